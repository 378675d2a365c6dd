"""The extras of pyproject.toml: what the documents say of them, and that a command needs nothing beyond its own."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rankscope.cli.main import SUBCOMMANDS
from tools.lock_images import read_toml

ROOT = Path(__file__).resolve().parents[2]
PROJECT = read_toml((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def requirements(extra: str, python: str = "3.12") -> set[str]:
    """Names of packages; an extra of ours in another is `[name]`."""
    found = set()
    for requirement in map(Requirement, EXTRAS[extra]):
        if requirement.marker is None or requirement.marker.evaluate({"python_version": python}):
            ours = requirement.name == PROJECT["name"]
            found |= {f"[{each}]" for each in requirement.extras} if ours else {canonicalize_name(requirement.name)}
    return found


def installed(names: set[str]) -> set[str]:
    """Distributions that come with these, themselves included."""
    found: set[str] = set()
    left = set(names)
    while left:
        name = left.pop()
        if name.startswith("["):
            left |= requirements(name.strip("[]"))
        elif name not in found:
            found.add(name)
            for text in importlib.metadata.requires(name) or ():
                requirement = Requirement(text)
                if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                    left.add(canonicalize_name(requirement.name))
    return found


def test_the_table_of_extras_is_that_of_the_project() -> None:
    table = (ROOT / "docs" / "getting-started.md").read_text()
    rows = dict(re.findall(r"^\| `\[(\w+)\]` \| (.*) \|$", table, re.MULTILINE))
    assert set(rows) == set(EXTRAS)
    for extra, row in rows.items():
        use, _, brings = row.partition(" | ")
        names = re.sub(r"the |extra|`|; .* on Python 3.10", "", brings)
        assert set(re.findall(r"\[\w+\]|[a-z0-9][a-z0-9-]+", names)) == requirements(extra), extra
        commands = set(re.findall(r"`(?:rankscope )?([a-z-]+)`", use))
        assert commands <= {each.name for each in SUBCOMMANDS if each.extra == extra}, extra


def test_python_3_10_gets_the_toml_reader_that_it_lacks() -> None:
    assert "tomli" in requirements("daemon", "3.10") and "tomli" not in requirements("daemon", "3.11")


REFUSING = """
import sys
class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"not in this extra: {{name}}", name=name)
sys.meta_path.insert(0, Refused())
from rankscope.cli.main import main
for words in {commands!r}:
    try:
        main([*words.split(), "--help"])
    except SystemExit as end:
        assert not end.code, words
"""


def start(commands: list[str], there: set[str]) -> str:
    """With no distributions but these; what the commands' help says."""
    modules = importlib.metadata.packages_distributions()
    refused = {name for name, owners in modules.items() if not {canonicalize_name(each) for each in owners} & there}
    program = REFUSING.format(names=refused, commands=commands)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr or done.stdout
    return done.stdout


@pytest.mark.parametrize("extra", sorted({command.extra for command in SUBCOMMANDS}))
def test_commands_start_with_the_packages_of_their_extra(extra: str) -> None:
    commands = [words for command in SUBCOMMANDS if command.extra == extra for words in command.modules]
    told = start(commands, installed({f"[{extra}]"}) | {PROJECT["name"]})
    assert re.findall(r"^usage: rankscope ([a-z -]+?) \[", told, re.MULTILINE) == commands


@pytest.mark.parametrize(
    ("locks", "command"), [(("operator",), "report captures"), (("daemon", "daemon-s3"), "report fleet")]
)
def test_reports_start_in_the_image_of_their_cronjob(locks: tuple[str, ...], command: str) -> None:
    texts = [(ROOT / "deploy" / "docker" / f"{name}.lock").read_text() for name in locks]
    there = {name for text in texts for name in re.findall(r"^([a-z0-9-]+)==", text, re.MULTILINE)}
    assert "--json" in start([command], there | {PROJECT["name"]})
