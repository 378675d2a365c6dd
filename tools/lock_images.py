"""Locks what the images install: deploy/docker/*.lock, with the hashes of the wheels that fit them.

    make lock                             regenerates them, in the versions of constraints.txt
    python -m tools.lock_images --check   fails where a lock is not what would be made today (asks the package index)

uv resolves. Of the files it finds, only wheels for the images' platforms and Python versions are kept: an image is
never built from a source archive, and a lock says for certain that both platforms can be served."""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "deploy" / "docker"
UV = ROOT / ".venv-release" / "bin" / "uv"
# The images have 3.12; the others are those of Debian 12 and 13, with which the check without an engine runs.
PYTHON_MINORS = (11, 12, 13)
MACHINES = ("x86_64", "aarch64")
GLIBC_MINOR = 36  # bookworm's
HEADER = """\
# {what}; versions from constraints.txt. Made by `make lock`: do not edit.
# Hashes are those of wheels for CPython {pythons} on Linux (glibc 2.{glibc}), {machines}.
"""


@dataclass(frozen=True)
class Lock:
    """`extras` are pyproject.toml's; none stands for what builds the wheel."""

    name: str
    extras: tuple[str, ...]

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.lock"

    @property
    def what(self) -> str:
        return f"What rankscope[{','.join(self.extras)}] needs" if self.extras else "What builds the wheel"


LOCKS = (
    Lock("build", ()),
    Lock("daemon", ("daemon",)),
    Lock("daemon-s3", ("daemon", "upload")),
    Lock("operator", ("operator",)),
)


class LockError(Exception):
    pass


def text_of(lock: Lock) -> str:
    pythons = ", ".join(f"3.{minor}" for minor in PYTHON_MINORS)
    header = HEADER.format(what=lock.what, pythons=pythons, glibc=GLIBC_MINOR, machines=" and ".join(MACHINES))
    return header + "".join(entry(package) for package in resolve(lock) if not is_ours(package))


def resolve(lock: Lock) -> Iterable[Mapping[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / f"pylock.{lock.name}.toml"
        source = ROOT / "pyproject.toml"
        if not lock.extras:
            requires = read_toml(source.read_text())["build-system"]["requires"]
            source = Path(folder) / "build.in"
            source.write_text("\n".join(requires))
        options = ["--quiet", "--no-config", "--universal", "--format=pylock.toml", f"--output-file={made}"]
        options += [f"--python-version=3.{PYTHON_MINORS[0]}", f"--constraint={ROOT / 'constraints.txt'}"]
        options += [f"--extra={extra}" for extra in lock.extras]
        subprocess.run([str(UV), "pip", "compile", *options, str(source)], check=True, cwd=ROOT)
        packages: list[Mapping[str, Any]] = read_toml(made.read_text())["packages"]
        return packages


def read_toml(text: str) -> dict[str, Any]:
    # hatchling brings tomli to the Python that has no tomllib.
    read: dict[str, Any] = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli").loads(text)
    return read


def is_ours(package: Mapping[str, Any]) -> bool:
    return package["name"] == "rankscope"


def entry(package: Mapping[str, Any]) -> str:
    name, version = package["name"], package["version"]
    marker = f" ; {package['marker']}" if "marker" in package else ""
    hashes = sorted(set(hashes_of(name, package.get("wheels", ()))))
    return " \\\n".join([f"{name}=={version}{marker}", *(f"    --hash=sha256:{value}" for value in hashes)]) + "\n"


def hashes_of(name: str, wheels: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    served: set[tuple[int, str]] = set()
    for wheel in wheels:
        fits = set(fitting(wheel["url"].rpartition("/")[2].partition("#")[0]))
        if fits:
            served |= fits
            yield wheel["hashes"]["sha256"]
    wanted = {(minor, machine) for minor in PYTHON_MINORS for machine in MACHINES}
    if missing := ", ".join(f"3.{minor} on {machine}" for minor, machine in sorted(wanted - served)):
        raise LockError(f"{name} has no wheel for Python {missing}: choose another version in constraints.txt")


def fitting(file_name: str) -> Iterator[tuple[int, str]]:
    """The Python versions and machines of ours that a wheel serves."""
    for tag in parse_wheel_filename(file_name)[3]:
        for minor in PYTHON_MINORS:
            for machine in MACHINES:
                if _python_fits(tag.interpreter, tag.abi, minor) and _platform_fits(tag.platform, machine):
                    yield minor, machine


def _python_fits(interpreter: str, abi: str, minor: int) -> bool:
    if interpreter == "py3":
        return abi == "none"
    found = re.fullmatch(r"cp3(\d+)", interpreter)
    if found is None:
        return False
    return (abi == "abi3" and int(found[1]) <= minor) or (int(found[1]) == minor and abi in (f"cp3{minor}", "none"))


def _platform_fits(platform: str, machine: str) -> bool:
    if platform in ("any", f"manylinux1_{machine}", f"manylinux2010_{machine}", f"manylinux2014_{machine}"):
        return True
    found = re.fullmatch(rf"manylinux_2_(\d+)_{machine}", platform)
    return found is not None and int(found[1]) <= GLIBC_MINOR


def main() -> int:
    parser = argparse.ArgumentParser(description="Locks what the images install.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a lock would change")
    check = parser.parse_args().check
    for lock in LOCKS:
        try:
            text = text_of(lock)
        except LockError as error:
            print(f"error: {lock.path.name}: {error}", file=sys.stderr)
            return 1
        if not check:
            lock.path.write_text(text)
        elif not lock.path.exists() or lock.path.read_text() != text:
            print(f"error: {lock.path.relative_to(ROOT)} is not what `make lock` makes", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
