"""A report on many captures: one row of each, and what the rows say together.

A row is all that a worker keeps of a capture. Sums are exact (`math.fsum`), so a report does not depend on the order of
the rows, nor on which worker made them. Field names are the keys of the JSON output (docs/report-captures.md)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import TypeVar

from msgspec import Struct

from rankscope.analysis.traces.diagnosis_rules import Finding
from rankscope.analysis.traces.summary_records import RankSummary
from rankscope.analysis.verdicts.verdict import Kind, Verdict

MAX_KERNELS = 10  # of a row, and of a report
MAX_NAME_CHARACTERS = 400  # names of kernels may be far longer
MAX_EXAMPLES = 3

Item = TypeVar("Item")


class KernelTime(Struct, frozen=True):
    name: str
    total_us: float


class FindingShare(Struct, frozen=True):
    kind: str
    saving_ratio: float  # upper bound, of the capture's steps
    suggestion: str


class CaptureRow(Struct, frozen=True):
    """Times are sums over the ranks."""

    capture: str
    run: str
    devices: tuple[str, ...]
    ranks: int
    span_us: float
    parts_us: dict[str, float]  # the span, divided without overlap
    step_us: float | None  # median of the ranks' median steps
    bound: str
    findings: tuple[FindingShare, ...]
    verdict: Kind | None  # None for one rank: there is nothing to compare it with
    culprits: tuple[int, ...]
    impact_ratio: float | None
    kernels: tuple[KernelTime, ...]  # the longest
    broken: tuple[str, ...]  # files, with the reason


class FindingTotal(Struct, frozen=True):
    kind: str
    captures: int
    saving_ratio: float  # upper bound, of the time of all captures
    worst: tuple[str, ...]  # captures that it costs most
    suggestion: str  # of the first of them


class RunTotal(Struct, frozen=True):
    run: str
    captures: int
    ranks: int  # of all its captures
    share_ratio: float  # of the time of all captures
    step_us: float | None  # median of its captures
    compute_ratio: float
    bound: str  # of most of its time
    finding: str  # the kind that costs it most; empty without one


class KernelTotal(Struct, frozen=True):
    name: str
    total_us: float
    share_ratio: float  # of the time of all captures; kernels run side by side, so shares may exceed it
    captures: int


class CaptureReport(Struct, frozen=True):
    schema_version: int
    captures: int
    ranks: int
    devices: tuple[str, ...]
    span_us: float
    shares: dict[str, float]  # of the time of all ranks, by part
    bounds: dict[str, int]  # captures by what bounds them
    verdicts: dict[str, int]  # captures by the comparison of their ranks
    findings: tuple[FindingTotal, ...]  # largest saving first
    runs: tuple[RunTotal, ...]  # most time first
    kernels: tuple[KernelTotal, ...]
    broken: tuple[str, ...]


SCHEMA_VERSION = 1


def capture_row(
    capture: str,
    run: str,
    ranks: Sequence[RankSummary],
    bound: str,
    findings: Iterable[Finding],
    verdict: Verdict | None,
    broken: tuple[str, ...],
) -> CaptureRow:
    kernels: dict[str, list[float]] = {}
    for rank in ranks:
        for kernel in rank.top_kernels:
            kernels.setdefault(kernel.name[:MAX_NAME_CHARACTERS], []).append(kernel.total_us)
    steps = [median(rank.step_times_us) for rank in ranks if rank.step_times_us]
    return CaptureRow(
        capture=capture,
        run=run,
        devices=tuple(sorted({rank.device for rank in ranks if rank.device})),
        ranks=len(ranks),
        span_us=math.fsum(rank.span_us for rank in ranks),
        parts_us=_sums([rank.parts_us for rank in ranks]),
        step_us=median(steps) if steps else None,
        bound=bound,
        findings=tuple(FindingShare(one.kind, one.saving_ratio, one.suggestion) for one in findings),
        verdict=verdict.kind if verdict else None,
        culprits=verdict.culprits if verdict else (),
        impact_ratio=verdict.impact_ratio if verdict else None,
        kernels=tuple(KernelTime(name, total) for name, total in _largest(kernels, math.fsum, MAX_KERNELS)),
        broken=broken,
    )


def capture_report(rows: Iterable[CaptureRow]) -> CaptureReport:
    """The same for the same rows, in any order."""
    rows = sorted(rows, key=lambda row: (row.run, row.capture))
    read = [row for row in rows if row.span_us > 0]
    span_us = math.fsum(row.span_us for row in read)
    parts = _sums([row.parts_us for row in read])
    return CaptureReport(
        schema_version=SCHEMA_VERSION,
        captures=len(read),
        ranks=sum(row.ranks for row in read),
        devices=tuple(sorted({device for row in read for device in row.devices})),
        span_us=span_us,
        shares={part: value / span_us for part, value in parts.items()},
        bounds=_counts([row.bound for row in read]),
        verdicts=_counts([row.verdict.value for row in read if row.verdict is not None]),
        findings=tuple(_findings(read, span_us)),
        runs=tuple(_runs(read, span_us)),
        kernels=tuple(_kernels(read, span_us)),
        broken=tuple(text for row in rows for text in row.broken),
    )


def _findings(rows: Sequence[CaptureRow], span_us: float) -> Iterable[FindingTotal]:
    costs: dict[str, list[tuple[float, str, str]]] = {}
    for row in rows:
        for one in row.findings:
            costs.setdefault(one.kind, []).append((one.saving_ratio * row.span_us, row.capture, one.suggestion))
    for kind, total in _largest(costs, lambda found: math.fsum(cost for cost, _, _ in found), len(costs)):
        worst = sorted(costs[kind], key=lambda one: (-one[0], one[1]))[:MAX_EXAMPLES]
        names = tuple(name for _, name, _ in worst)
        yield FindingTotal(kind, len(costs[kind]), total / span_us, names, worst[0][2])


def _runs(rows: Sequence[CaptureRow], span_us: float) -> Iterable[RunTotal]:
    by_run: dict[str, list[CaptureRow]] = {}
    for row in rows:
        by_run.setdefault(row.run, []).append(row)
    for run, total in _largest(by_run, lambda rows: math.fsum(row.span_us for row in rows), len(by_run)):
        own = by_run[run]
        steps = [row.step_us for row in own if row.step_us is not None]
        bounds: dict[str, list[float]] = {}
        for row in own:
            bounds.setdefault(row.bound, []).append(row.span_us)
        yield RunTotal(
            run=run,
            captures=len(own),
            ranks=sum(row.ranks for row in own),
            share_ratio=total / span_us,
            step_us=median(steps) if steps else None,
            compute_ratio=_sums([row.parts_us for row in own]).get("compute", 0.0) / total,
            bound=_largest(bounds, math.fsum, 1)[0][0],
            finding=next((one.kind for one in _findings(own, total)), ""),
        )


def _kernels(rows: Sequence[CaptureRow], span_us: float) -> Iterable[KernelTotal]:
    times: dict[str, list[float]] = {}
    for row in rows:
        for kernel in row.kernels:
            times.setdefault(kernel.name, []).append(kernel.total_us)
    for name, total in _largest(times, math.fsum, MAX_KERNELS):
        yield KernelTotal(name, total, total / span_us, len(times[name]))


def _sums(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {
        part: math.fsum(row.get(part, 0.0) for row in rows) for part in sorted({key for row in rows for key in row})
    }


def _counts(words: Sequence[str]) -> dict[str, int]:
    """The most frequent first."""
    return dict(sorted(((word, words.count(word)) for word in set(words)), key=lambda one: (-one[1], one[0])))


def _largest(groups: dict[str, list[Item]], total: Callable[[list[Item]], float], most: int) -> list[tuple[str, float]]:
    sums = [(name, total(items)) for name, items in groups.items()]
    return sorted(sums, key=lambda one: (-one[1], one[0]))[:most]
