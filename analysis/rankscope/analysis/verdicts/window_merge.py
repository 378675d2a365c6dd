"""Windows are shorter than some jobs' steps: gather them until every rank has a few steps to be judged by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

import numpy as np

from rankscope.analysis.verdicts.gpu_throttling import merge_gpus
from rankscope.analysis.verdicts.stack_profiles import merge_profiles
from rankscope.analysis.verdicts.windows import AsynchronousRun, JobWindow, RankColumns, RankEvidence

_KEYS = {"job", "rank", "stage", "place"}
_OF_LONG_STEPS = {"long_seconds", "late_seconds", "long_ratio", "late_ratio", "late_ahead_seconds"}


def merge_columns(parts: Sequence[RankColumns]) -> RankColumns:
    """The ranks that are in all parts; per-step values weighted by steps, steps summed."""
    if len(parts) == 1:
        return parts[0]
    common = parts[0].rank
    for part in parts[1:]:
        common = np.intersect1d(common, part.rank)
    aligned = [part.take(np.searchsorted(part.rank, common)) for part in parts]
    steps = np.array([np.nan_to_num(part.steps) for part in aligned])
    made = {}
    for column in fields(RankColumns):
        if column.name in _KEYS:
            made[column.name] = getattr(aligned[-1], column.name)
            continue
        values = np.array([getattr(part, column.name) for part in aligned])
        if column.name in _OF_LONG_STEPS:
            # A window without any says nothing of them. In one that has some, it may be unknown who was late.
            has_none = np.array([np.isnan(part.long_seconds) for part in aligned])
            is_unknown = (np.isnan(values) & ~has_none).any(axis=0)
            values[has_none] = 0.0
            values[:, is_unknown] = np.nan
        weights = np.where(np.isnan(values), 0.0, steps)
        total = weights.sum(axis=0)
        known = np.where(weights > 0, values, 0.0)
        made[column.name] = np.where(total > 0, (known * weights).sum(axis=0) / np.maximum(total, 1e-12), np.nan)
    made["steps"] = steps.sum(axis=0)
    sampled = np.array([part.self_steps for part in aligned])
    made["self_steps"] = np.where(np.isnan(sampled), steps, sampled).sum(axis=0)
    return RankColumns(**made)


def merge_evidence(windows: Sequence[JobWindow], only: Sequence[int] | None = None) -> Mapping[int, RankEvidence]:
    """Stacks and ranges of all windows together; of the rest the latest. `only` names the ranks wanted."""
    tables = [window.evidence() for window in windows]
    merged = {}
    for rank in tables[-1] if only is None else only:
        latest = tables[-1].get(rank)
        if latest is None:
            continue
        earlier = (table.get(rank) for table in tables[:-1])
        seen = [*(evidence for evidence in earlier if evidence is not None), latest]
        profiles = [evidence.stacks for evidence in seen if evidence.stacks is not None]
        starved = [evidence.starved_share for evidence in seen if evidence.starved_share is not None]
        merged[rank] = replace(
            latest,
            stacks=merge_profiles(profiles),
            starved_share=float(np.mean(starved)) if starved else None,
            gpu=merge_gpus([evidence.gpu for evidence in seen if evidence.gpu is not None]),
            ranges=_merge_ranges([evidence.ranges for evidence in seen if evidence.ranges]),
        )
    return merged


def _merge_ranges(parts: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    """Means. A range that a window does not name took no time in it."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0.0) for part in parts) / len(parts) for name in names}


def merge_windows(windows: Sequence[JobWindow]) -> JobWindow:
    if len(windows) == 1:
        return windows[0]
    kept = tuple(windows)
    return replace(
        windows[-1],
        window_seconds=sum(window.window_seconds for window in windows),
        columns=merge_columns([window.columns for window in windows]),
        evidence=lambda: merge_evidence(kept),
        asynchronous=_merge_runs([window.asynchronous for window in windows]),
    )


def _merge_runs(runs: Sequence[AsynchronousRun | None]) -> AsynchronousRun | None:
    known = [run for run in runs if run is not None]
    return replace(known[-1], servers=merge_columns([run.servers for run in known])) if known else None
