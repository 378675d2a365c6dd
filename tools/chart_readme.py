"""The chart's README.md: a page by hand, and a table of every value made of the comments in values.yaml."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

NOTE = "<!-- Written by `make chart` from values.yaml and tools/chart_readme.md; do not edit. -->\n\n"
MARK = "<!-- values -->"
_KEY = re.compile(r"^( *)([A-Za-z][A-Za-z0-9]*):")
_MEANING = re.compile(r"^ *# -- (.*)$")


class ValuesError(Exception):
    """A value that nobody explains, or an explanation without a value."""


@dataclass(frozen=True)
class DescribedValue:
    path: str
    default: object
    meaning: str


def described_values(text: str) -> list[DescribedValue]:
    """Every value with the comment right above it, in order. A map that has a comment of its own is one value."""
    values = yaml.safe_load(text)
    meanings = dict(_meanings(text))
    found = [DescribedValue(path, default, meanings.pop(path, "")) for path, default in _leaves(values, set(meanings))]
    bare = [value.path for value in found if not value.meaning]
    if bare or meanings:
        raise ValuesError(f"without a comment: {bare}; comments on nothing: {sorted(meanings)}")
    return found


def _meanings(text: str) -> Iterator[tuple[str, str]]:
    path: list[tuple[int, str]] = []
    meaning = ""
    for line in text.splitlines():
        if comment := _MEANING.match(line):
            meaning = comment.group(1)
        elif key := _KEY.match(line):
            indent = len(key.group(1))
            path = [*(step for step in path if step[0] < indent), (indent, key.group(2))]
            if meaning:
                yield ".".join(name for _, name in path), meaning
            meaning = ""


def _leaves(values: Any, described: set[str], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and value and path not in described:
            yield from _leaves(value, described, f"{path}.")
        else:
            yield path, value


def readme(template: Path, values: Path) -> str:
    rows = ["| value | default | meaning |", "|---|---|---|"]
    for value in described_values(values.read_text()):
        default = json.dumps(value.default, ensure_ascii=False).replace("|", "\\|")
        rows.append(f"| `{value.path}` | `{default}` | {value.meaning.replace('|', chr(92) + '|')} |")
    return NOTE + template.read_text().replace(MARK, "\n".join(rows))
