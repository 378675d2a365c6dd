"""What a PromQL expression asks for, well enough to hold it against what is exported."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SELECTOR = re.compile(r"\b(rankscope_\w+)(?![\w:])\s*(\{[^}]*\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"((?:[^"\\]|\\.)*)"')


RUNBOOKS = Path(__file__).resolve().parents[1] / "rules" / "runbooks"


def runbook_queries() -> Iterator[tuple[Path, str]]:
    """Each query that a runbook asks promtool, with its page."""
    for page in sorted(RUNBOOKS.glob("*.md")):
        yield from (
            (page, query) for query in re.findall(r"^promtool query .* '(.*)'$", page.read_text(), re.MULTILINE)
        )


@dataclass(frozen=True)
class Matcher:
    label: str
    operator: str
    value: str

    @property
    def words(self) -> list[str]:
        """The values it names, if it names any: none for a variable or a true regular expression."""
        if not re.fullmatch(r"[\w.|]+", self.value):
            return []
        return self.value.split("|") if self.operator in ("=~", "!~") else [self.value]


@dataclass(frozen=True)
class Selector:
    metric: str
    matchers: tuple[Matcher, ...] = ()


def selectors(expression: str) -> Iterator[Selector]:
    """Of our metrics; names of recording rules, which have colons, are none."""
    for match in _SELECTOR.finditer(expression):
        if expression[: match.start()].endswith(":"):
            continue
        yield Selector(match[1], tuple(Matcher(*found) for found in _MATCHER.findall(match[2] or "")))


def label_lists(expression: str) -> Iterator[set[str]]:
    """The labels of each `by` and `on` that has any."""
    for found in re.findall(r"\b(?:by|on) ?\(([^)]*)\)", expression):
        if labels := {label.strip() for label in found.split(",")} - {""}:
            yield labels
