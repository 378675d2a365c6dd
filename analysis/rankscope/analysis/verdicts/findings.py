"""What one window of one job shows: slow ranks, a slow stage, slow communication, uneven data. Each finding is made on
its own; rules.py decides which of them lasts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isnan, nan
from typing import NamedTuple

import numpy as np

from rankscope.analysis.stats.robust import Bools, Floats, median_or_nan
from rankscope.analysis.verdicts.asynchronous import SlowServer, find_slow_server, with_own_shares
from rankscope.analysis.verdicts.critical_path import PathFinding
from rankscope.analysis.verdicts.job_summary import JobSummary, is_contended
from rankscope.analysis.verdicts.long_steps import FoundStalls, LongStepHistory
from rankscope.analysis.verdicts.network_causes import network_evidence
from rankscope.analysis.verdicts.path_findings import NOTHING_COMMON, find_common
from rankscope.analysis.verdicts.slow_communication import SlowTransfer, TransferBaseline
from rankscope.analysis.verdicts.slow_rank import Screen, find_split, step_noise
from rankscope.analysis.verdicts.slow_stage import SlowStage, find_slow_stage
from rankscope.analysis.verdicts.thresholds import FIXED, Policy
from rankscope.analysis.verdicts.verdict import ranks
from rankscope.analysis.verdicts.windows import JobWindow, RankColumns

# Evidence is read from the whole window of a rank, which costs more than its row.
MAX_RANKS_LOOKED_AT = 8

# Uneven data: no rank in particular is slow, yet all wait, because another rank is last each step.


def imbalance_impact(summary: JobSummary, policy: Policy) -> float | None:
    """Share of the step that even data would give back, if the window looks like uneven data; else None."""
    waited = summary.mean_waited_ratio
    spread = summary.self_spread_ratio
    if isnan(waited) or isnan(spread) or is_contended(summary, policy):
        return None
    if summary.slowest_excess_ratio >= policy.imbalance_one_rank_share * waited:
        return None  # one rank holds what the others wait for: it is late, if only for part of the window
    uneven = waited >= policy.imbalance_wait_ratio and spread >= policy.imbalance_spread
    return waited if uneven else None


class ReadyWindow(NamedTuple):
    """A window that is ready for judging, with the comparison of its ranks."""

    window: JobWindow
    all_ranks: Screen
    rows: slice  # this job's, in `all_ranks`
    summary: JobSummary

    @property
    def screen(self) -> Screen:
        return self.all_ranks.take(self.rows)

    @property
    def excess_seconds(self) -> Floats:
        """What each rank works longer than its cohort."""
        compared: Floats = self.all_ranks.compared_seconds[self.rows] - self.all_ranks.reference_seconds[self.rows]
        return compared

    @property
    def filled_ratio(self) -> float:
        """Share of the window that its steps take, at most 1."""
        return min(self.summary.fewest_steps * self.summary.step_seconds / self.window.window_seconds, 1.0)

    def without_outliers(self) -> ReadyWindow:
        return self._replace(summary=self.summary._replace(outliers=0.0, widest_cohort_spread=nan))


class Observation(NamedTuple):
    """The findings of one job in one window. A tuple, because it is cheap to create for every job at every tick."""

    columns: RankColumns
    # Kept only where a rank stands out or stalls: the stacks of the others are not needed, and those of a large job
    # would take gigabytes over the windows that are remembered.
    window: JobWindow | None
    screen: Screen | None
    summary: JobSummary
    excess_seconds: Floats  # of each rank beyond its cohort
    remarkable: bool  # some rule may want to see it
    outliers: frozenset[int]
    lingering: frozenset[int]
    impact_ratio: float  # of the outliers together
    stage: SlowStage | None
    stage_lingering: SlowStage | None
    transfer: SlowTransfer | None
    network: str  # what explains the transfer; empty where nothing does
    imbalance_impact_ratio: float | None
    late: Mapping[int, float]  # seconds in long steps, by rank
    stalls: FoundStalls
    lost_by_all_seconds: float  # in long steps of all ranks
    is_moment_for_stacks: bool
    tokens: TokenImbalance | None = None  # which explains `imbalance_impact_ratio`
    server: SlowServer | None = None  # of an asynchronous run
    is_asynchronous: bool = False
    long_steps_impact_ratio: float = 0.0  # of `impact_ratio`, what sits in long steps


def observe(ready: ReadyWindow, baseline: TransferBaseline, long_steps: LongStepHistory, policy: Policy) -> Observation:
    window, summary = ready.window, ready.summary
    late = long_steps.add(window.columns, summary, policy)
    screen = outlier = imbalance = stage = lingering_stage = transfer = None
    any_outlier = summary.outliers > 0
    # Absurd times have outliers without a spread.
    if any_outlier or summary.widest_cohort_spread >= 1 + policy.hysteresis * (summary.rank_ratio - 1):
        screen = ready.screen
        outlier = screen.outlier
    elif late:
        screen = ready.screen
    if screen is not None and not any_outlier and summary.widest_cohort_spread >= summary.rank_ratio:
        outlier, screen, imbalance = _look_for_splits(window, screen, summary, policy)
        any_outlier = bool(outlier.any())
    tokens = None
    if screen is not None and any_outlier:
        explained = explained_by_tokens(window.columns, screen, policy)
        if explained.any():
            tokens = find_token_imbalance(window.columns, screen, explained)
            screen = replace(screen, outlier=screen.outlier & ~explained)
            outlier, imbalance = screen.outlier, tokens.impact_ratio
            any_outlier = bool(outlier.any())
    if not any_outlier and tokens is None:
        if summary.stages_known and summary.last_stage > 0:
            stage = find_slow_stage(window.columns, summary, policy)
            if stage is None:
                lingering_stage = find_slow_stage(window.columns, summary, policy, policy.hysteresis)
        transfer = baseline.compare(summary, policy)
        if imbalance is None and stage is None and transfer is None:
            imbalance = imbalance_impact(summary, policy)
    # Steps of hosts vary by a third, which looks like waiting in turn.
    if imbalance is not None and tokens is None and (window.is_host_paced or _share_device(window)):
        imbalance = None
    findings = (stage, transfer, imbalance)
    return Observation(
        window.columns,
        window if any_outlier or late or any(long_steps.found) or long_steps.is_moment_for_stacks else None,
        screen,
        summary,
        ready.excess_seconds,
        remarkable=any_outlier
        or any(f is not None for f in (*findings, *long_steps.found))
        or _concerns_everyone(summary, policy),
        outliers=frozenset(window.columns.rank[outlier].tolist()) if any_outlier else frozenset(),
        lingering=frozenset(window.columns.rank[screen.lingering].tolist()) if screen else frozenset(),
        impact_ratio=float(np.nanmax(screen.impact_ratio[outlier], initial=0.0)) if screen and any_outlier else 0.0,
        stage=stage,
        stage_lingering=lingering_stage,
        transfer=transfer,
        network=_network_evidence(window, policy) if transfer is not None else "",
        imbalance_impact_ratio=imbalance,
        late=late,
        stalls=long_steps.found,
        lost_by_all_seconds=long_steps.lost_by_all_seconds,
        is_moment_for_stacks=long_steps.is_moment_for_stacks,
        tokens=tokens,
    )


def observe_path(ready: ReadyWindow, path: PathFinding, long_steps: LongStepHistory, policy: Policy) -> Observation:
    """Takes all findings from the critical path. Where ranks have different roles, sums show neither who began a wait
    that is passed on, nor a long stage, nor uneven data."""
    window, summary, steps = ready.window, ready.summary, path.window
    late, is_long = long_steps.add_path(steps, policy)
    any_outlier = bool(path.slow.any())
    returns = steps.returns
    # A busy machine spreads steps and slows transfers.
    is_explained = any_outlier or bool(late) or is_contended(summary, policy)
    common = NOTHING_COMMON if is_explained else find_common(path.recent, policy)
    if common.imbalance_impact_ratio is not None and _share_device(window):
        common = replace(common, imbalance_impact_ratio=None)
    screen = replace(
        ready.screen,
        compared_seconds=steps.own_seconds,
        reference_seconds=steps.peers_seconds,
        impact_ratio=np.where(path.slow, returns, np.nan),
        starved=ready.screen.starved & path.slow,
        outlier=path.slow,
        lingering=path.lingering,
        issued_late_share=steps.issued_late_share,
    )
    return Observation(
        window.columns,
        window if any_outlier or late or any(long_steps.found) or long_steps.is_moment_for_stacks else None,
        screen if any_outlier or late or path.lingering.any() else None,
        summary,
        screen.compared_seconds - screen.reference_seconds,
        remarkable=any_outlier
        or common.is_remarkable
        or any(one is not None for one in long_steps.found)
        or _concerns_everyone(summary, policy),
        outliers=frozenset(window.columns.rank[path.slow].tolist()),
        lingering=frozenset(window.columns.rank[path.lingering].tolist()),
        impact_ratio=float(min(returns[path.slow].sum(), 1.0)),
        stage=common.stage,
        stage_lingering=common.stage_lingering,
        transfer=common.transfer,
        network=_network_evidence(window, policy) if common.transfer is not None else "",
        imbalance_impact_ratio=common.imbalance_impact_ratio,
        late=late,
        stalls=long_steps.found,
        lost_by_all_seconds=long_steps.lost_by_all_seconds,
        is_moment_for_stacks=long_steps.is_moment_for_stacks,
        long_steps_impact_ratio=float(steps.returns_in(is_long)[path.slow].sum()),
    )


def observe_workers(ready: ReadyWindow, policy: Policy) -> Observation:
    """Of an asynchronous run. Its ranks do not wait for each other, so that there is no slow stage, no uneven data and
    no stall that others would have to wait for."""
    window, summary = ready.window, ready.summary
    assert window.asynchronous is not None
    screen = with_own_shares(ready.screen, window.columns, policy)
    server = find_slow_server(window.columns, window.asynchronous, policy)
    any_outlier = bool(screen.outlier.any())
    return Observation(
        window.columns,
        window if any_outlier or server is not None else None,
        screen if any_outlier else None,
        summary,
        ready.excess_seconds,
        remarkable=any_outlier or server is not None or _concerns_everyone(summary, policy),
        outliers=frozenset(window.columns.rank[screen.outlier].tolist()),
        lingering=frozenset(window.columns.rank[screen.lingering].tolist()),
        impact_ratio=min(float(np.nansum(screen.impact_ratio)), 1.0),
        stage=None,
        stage_lingering=None,
        transfer=None,
        network="",
        imbalance_impact_ratio=None,
        late={},
        stalls=FoundStalls(),
        lost_by_all_seconds=0.0,
        is_moment_for_stacks=False,
        server=server,
        is_asynchronous=True,
    )


def _share_device(window: JobWindow) -> bool:
    """Ranks that share a GPU get its time in turn, and so wait in turn."""
    evidence = window.evidence()
    some = (evidence.get(rank) for rank in window.columns.rank[:MAX_RANKS_LOOKED_AT].tolist())
    return any(one is not None and one.gpu is not None and one.gpu.shared for one in some)


def _network_evidence(window: JobWindow, policy: Policy) -> str:
    networks = window.network()
    return network_evidence({window.place_names.get(at, str(at)): one for at, one in networks.items()}, policy)


def _concerns_everyone(summary: JobSummary, policy: Policy) -> bool:
    return summary.input_ratio >= policy.input_bound_ratio or summary.mfu_ratio < (policy.mfu_target_ratio or 0.0)


def _look_for_splits(
    window: JobWindow, screen: Screen, summary: JobSummary, policy: Policy
) -> tuple[Bools, Screen, float | None]:
    """Half of a cohort may be slow: a median cannot see it. Where the split follows a node, that node is slow. Halves
    must stand out of the noise of their steps, as a rank must: four ranks fall into two pairs by chance."""
    columns = window.columns
    noise = step_noise(columns)
    outlier = screen.outlier.copy()
    reference, impact = screen.reference_seconds.copy(), screen.impact_ratio.copy()
    imbalance: float | None = None
    for stage in np.unique(columns.stage):
        rows = np.flatnonzero(columns.stage == stage)
        split = find_split(screen.compared_seconds[rows], columns.place[rows], float(screen.rank_ratio[rows[0]]))
        if split is None:
            continue
        excess = split.slow_seconds - split.fast_seconds
        share = excess / max(summary.step_seconds, split.slow_seconds)
        if not share >= policy.impact_ratio:
            continue
        if excess < policy.rank_score * policy.step_noise_weight * float(noise[rows].mean()):
            continue
        is_wide = split.slow_seconds >= policy.rank_ratio * split.fast_seconds
        if split.follows_place:
            outlier[rows[split.slow]] = True
            reference[rows] = split.fast_seconds
            impact[rows[split.slow]] = share
        elif is_wide and not is_contended(summary, policy):
            imbalance = max(imbalance or 0.0, share)
    return outlier, replace(screen, reference_seconds=reference, impact_ratio=impact, outlier=outlier), imbalance


@dataclass(frozen=True)
class TokenImbalance:
    """Ranks that work longer because they were given more to work on: experts of a mixture that get most of the tokens.
    Known only where the program counts its tokens (`rankscope.probe.count_tokens`)."""

    busiest: tuple[int, ...]
    tokens_ratio: float  # of the busiest to the median rank
    impact_ratio: float

    def __str__(self) -> str:
        get = "gets" if len(self.busiest) == 1 else "get"
        return f"{ranks(self.busiest)} {get} {self.tokens_ratio:.1f}× the tokens of the others in every step"


def explained_by_tokens(columns: RankColumns, screen: Screen, policy: Policy) -> Bools:
    """Of the outliers: those with more tokens than the others, by at least as much as they work longer."""
    tokens = columns.tokens_per_step
    usual = median_or_nan(tokens)
    if np.isnan(tokens).any() or not usual > 0:
        return np.zeros(len(columns), dtype=bool)
    with np.errstate(all="ignore"):
        ratio = tokens / usual
        longer = screen.compared_seconds / screen.reference_seconds
    explained: Bools = (
        screen.outlier & (ratio >= policy.rank_ratio) & (longer - 1 <= (1 + FIXED.token_excess_ratio) * (ratio - 1))
    )
    return explained


def find_token_imbalance(columns: RankColumns, screen: Screen, explained: Bools) -> TokenImbalance:
    """At least one rank is explained."""
    tokens = columns.tokens_per_step
    return TokenImbalance(
        tuple(columns.rank[explained].tolist()),
        float(tokens[explained].max() / median_or_nan(tokens)),
        float(np.nanmax(screen.impact_ratio[explained], initial=0.0)),
    )
