"""What a builder gets to see of the checkout: the rules of .dockerignore, as a builder applies them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Rule:
    pattern: str
    keeps: bool

    def matches(self, path: str) -> bool:
        """The path itself or a folder it lies in."""
        parts = path.split("/")
        return any(_expression(self.pattern).fullmatch("/".join(parts[:end])) for end in range(1, len(parts) + 1))

    def may_match_below(self, folder: str) -> bool:
        """Whether something inside a folder could match: compares as many parts as both have."""
        ours, theirs = self.pattern.split("/"), folder.split("/")
        return all(
            pattern == "**" or _expression(pattern).fullmatch(part) for pattern, part in zip(ours, theirs, strict=False)
        )


def read_rules(text: str) -> list[Rule]:
    lines = [line.strip() for line in text.splitlines()]
    return [
        Rule(line.lstrip("!").strip("/"), line.startswith("!")) for line in lines if line and not line.startswith("#")
    ]


def is_visible(path: str, rules: list[Rule]) -> bool:
    """The last rule that matches decides."""
    visible = True
    for rule in rules:
        if rule.keeps != visible and rule.matches(path):
            visible = rule.keeps
    return visible


def visible_files(root: Path, rules: list[Rule]) -> Iterator[str]:
    for folder, names, files in os.walk(root):
        where = Path(folder).relative_to(root).as_posix().removeprefix(".")
        below = {name: f"{where}/{name}".lstrip("/") for name in names}
        names[:] = [name for name in names if _may_hold_visible(below[name], rules)]
        for name in files:
            path = f"{where}/{name}".lstrip("/")
            if is_visible(path, rules):
                yield path


def _may_hold_visible(folder: str, rules: list[Rule]) -> bool:
    return is_visible(folder, rules) or any(rule.keeps and rule.may_match_below(folder) for rule in rules)


def _expression(pattern: str) -> re.Pattern[str]:
    made = re.escape(pattern).replace(r"\*\*/", "(?:.*/)?").replace(r"\*\*", ".*").replace(r"\*", "[^/]*")
    return re.compile(made.replace(r"\?", "[^/]"))
