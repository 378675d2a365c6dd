"""Which rank a trace file is of: what the trace says, else its name; and what to do when two say the same."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

# Most telling first. Bare numbers are short: torch's default names end in a time, libkineto's in a process id.
_PATTERNS = (
    re.compile(r"(?:^|[^a-z])rank[-_ =.]?(\d+)(?!\d)"),
    re.compile(r"(?:^|[^a-z0-9])r[-_]?(\d+)(?=[._-]|$)"),
    re.compile(r"(?:^|[^a-z])worker[-_.]?(\d+)(?!\d)"),
    re.compile(r"(?:^|[^a-z])(?:trace|profile|kineto)[-_.]?(\d{1,5})$"),
    re.compile(r"\.(\d{1,5})$"),
    re.compile(r"^(\d{1,5})$"),
)
_SUFFIX = re.compile(r"(\.pt)?(\.trace)?\.json(\.gz)?$")


def rank_in_name(path: Path) -> int | None:
    """`rank-12.json`, `job_rank12.pt.trace.json.gz`, `r12.json`, `worker3.pt.trace.json`, `x.12.pt.trace.json`,
    `rank_12/trace.json`."""
    name = _SUFFIX.sub("", path.name.lower())
    for text, patterns in ((name, _PATTERNS), (path.parent.name.lower(), _PATTERNS[:1])):
        for pattern in patterns:
            found = pattern.findall(text)
            if found:
                return int(found[-1])
    return None


@dataclass(frozen=True)
class Claim:
    path: Path
    told: int | None  # by the trace itself
    named: int | None  # by the file's name


@dataclass(frozen=True)
class Assigned:
    rank: dict[Path, int | None]  # without those files that cannot have one of their own
    reason: dict[Path, str]


def assign_ranks(claims: list[Claim]) -> Assigned:
    """What a trace says about itself counts more than its name, except where several say the same and their names
    tell them apart: each was then profiled as a job of its own."""
    told = Counter(claim.told for claim in claims if claim.told is not None)
    names = Counter(claim.named for claim in claims if claim.named is not None)
    rank: dict[Path, int | None] = {}
    reason: dict[Path, str] = {}
    holder: dict[int, Path] = {}
    for claim in claims:
        mine, why = claim.told, "the trace says so"
        if claim.told is None:
            mine, why = claim.named, "the file's name says so"
        elif told[claim.told] > 1 and claim.named is not None and names[claim.named] == 1:
            mine, why = claim.named, "the file's name says so; several files say the same rank"
        if mine is None:
            rank[claim.path], reason[claim.path] = None, "neither the trace nor the file's name tells the rank"
        elif mine in holder:
            other = holder[mine]
            reason[claim.path] = f"it is of rank {mine}, and so is {other}; give one trace per rank"
        else:
            holder[mine] = claim.path
            rank[claim.path], reason[claim.path] = mine, why
    return Assigned(rank, reason)
