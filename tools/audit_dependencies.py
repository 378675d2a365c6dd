"""`make audit`: holds every package of the images' locks against the known vulnerabilities, and tells their licences.

Asks the package index first, then OSV about what the index could not say. A package that nobody could say anything
about is not one without vulnerabilities: exit status 2, where pip-audit would end with 0. Status 1 is a finding."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.lock_images import LOCKS, ROOT

PIP_AUDIT = ROOT / ".venv-release" / "bin" / "pip-audit"
SERVICES = ("pypi", "osv")


@dataclass(frozen=True)
class Answer:
    """`vulnerabilities` is None where the service had nothing to say about the package."""

    package: str
    vulnerabilities: tuple[str, ...] | None


def answers(report: Mapping[str, Any]) -> list[Answer]:
    return [_answer(dependency) for dependency in report["dependencies"]]


def _answer(dependency: Mapping[str, Any]) -> Answer:
    if "skip_reason" in dependency:
        return Answer(dependency["name"], None)
    found = (
        f"{each['id']} (fixed in {', '.join(each['fix_versions']) or 'no version'})" for each in dependency["vulns"]
    )
    return Answer(dependency["name"], tuple(found))


def ask(lock: Path, service: str) -> list[Answer]:
    command = [str(PIP_AUDIT), "--format=json", "--progress-spinner=off", f"--vulnerability-service={service}"]
    command += ["--disable-pip", "--require-hashes", "--requirement", str(lock)]
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        return answers(json.loads(done.stdout))
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        print(f"{lock.name}: {service} could not be asked: {last[:200]}", file=sys.stderr)
        return []


def names(lock: Path) -> list[str]:
    return re.findall(r"^([a-z0-9-]+)==", lock.read_text(), re.MULTILINE)


def audit(lock: Path) -> dict[str, tuple[str, ...] | None]:
    known: dict[str, tuple[str, ...] | None] = dict.fromkeys(names(lock))
    for service in SERVICES:
        if None in known.values():
            told = ask(lock, service)
            known |= {each.package: each.vulnerabilities for each in told if each.vulnerabilities is not None}
    return known


def licences(packages: Iterable[str]) -> dict[str, list[str]]:
    """As the packages tell it themselves; of those installed here."""
    by_licence: defaultdict[str, list[str]] = defaultdict(list)
    for name in packages:
        try:
            by_licence[_licence(importlib.metadata.metadata(name))].append(name)
        except importlib.metadata.PackageNotFoundError:
            by_licence["(not installed here)"].append(name)
    return dict(sorted(by_licence.items()))


def _licence(metadata: Any) -> str:
    told = [value.rpartition(" :: ")[2] for value in metadata.get_all("Classifier", ()) if value.startswith("License")]
    text: str = metadata.get("License-Expression") or ", ".join(told) or metadata.get("License") or "(not told)"
    return text.splitlines()[0]


def main() -> int:
    unknown: set[str] = set()
    seen: set[str] = set()
    found = 0
    for lock in LOCKS:
        known = audit(lock.path)
        seen |= set(known)
        for package, vulnerabilities in known.items():
            for vulnerability in vulnerabilities or ():
                found += 1
                print(f"{lock.path.name}: {package}: {vulnerability}")
        silent = {package for package, vulnerabilities in known.items() if vulnerabilities is None}
        unknown |= silent
        print(f"{lock.path.name}: {len(known)} packages, {len(known) - len(silent)} audited")
    print("\nlicences")
    for licence, packages in licences(sorted(seen)).items():
        print(f"  {licence}: {', '.join(packages)}")
    print(f"\n{found} vulnerabilities; {len(unknown)} of {len(seen)} packages that no service could be asked about")
    return 1 if found else 2 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
