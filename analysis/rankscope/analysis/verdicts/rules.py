"""The verdict from a job's last windows: a rule per kind, with persistence on the way up, hysteresis on the way down.
`Damper` then keeps the verdict from changing between kinds."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from rankscope.analysis.profiles.phases import WAITING_PHASES
from rankscope.analysis.stats.robust import MAD_TO_SIGMA, Bools, Floats, median_or_nan
from rankscope.analysis.verdicts.asynchronous import pace, server_cause
from rankscope.analysis.verdicts.causes import name_cause, peers_of
from rankscope.analysis.verdicts.findings import Observation
from rankscope.analysis.verdicts.job_summary import is_contended
from rankscope.analysis.verdicts.path_findings import UNEVEN
from rankscope.analysis.verdicts.slow_communication import SlowTransfer
from rankscope.analysis.verdicts.slow_rank import Screen, is_timed_on_device, with_stalls
from rankscope.analysis.verdicts.slow_stage import SlowStage
from rankscope.analysis.verdicts.stack_profiles import StackHistory
from rankscope.analysis.verdicts.stall_lines import StallLines
from rankscope.analysis.verdicts.thresholds import FIXED, Policy
from rankscope.analysis.verdicts.verdict import (
    NETWORK,
    Cause,
    Confidence,
    Kind,
    Severity,
    Verdict,
    milliseconds,
    percent,
    ranks,
    source_line,
)
from rankscope.analysis.verdicts.window_merge import merge_evidence
from rankscope.analysis.verdicts.windows import HOST_WAITING_PHASES, FrameSeen, JobWindow, RankColumns

# A few dozen peers show what is usual; reading the stacks of all would take minutes in a large job.
PEERS_ASKED = 64
USUAL_RANKS_ASKED = 4
CAUSE_KEPT_WINDOWS = 5
MAX_PAST_WINDOWS = 30
HEALTHY = Verdict(Kind.HEALTHY, "no rank, stage or link stands out")
# Changes of excesses from window to window that show what they vary by.
MIN_CHANGES = 4
# Kinds of which a beginning looks like uneven data.
EXPLAINS_UNEVEN = (Kind.SLOW_RANK, Kind.SLOW_STAGE)
# A cause of another kind must be found so often in a row before it replaces the one that was named.
CAUSE_CHANGES_AFTER = 2


class RecentWindows:
    """What a job's last windows showed."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._recent: deque[Observation] = deque(maxlen=policy.windows_kept)
        self._before = HEALTHY
        self._usual_steps: deque[float] = deque(maxlen=MAX_PAST_WINDOWS)  # of windows in which nothing stood out
        self._usual_waits: deque[float] = deque(maxlen=MAX_PAST_WINDOWS)  # of the same windows
        self._excesses: deque[Floats] = deque(maxlen=MAX_PAST_WINDOWS)  # of the ranks, by window
        self._cause_age = 0
        self._history = StackHistory()
        self._usual_stacks = StackHistory()
        self._lines: dict[bool, StallLines] = {}  # of stalls of all ranks together, and in turn
        self._other_causes = 0  # in a row
        self._unremarkable = 0  # windows since the last finding of any kind

    def decide(self, observation: Observation, standing: Verdict, windows: int = 1) -> Verdict:
        """The verdict with one more observation; `standing` is the one before it, for hysteresis. `windows`: of how
        many windows the observation is."""
        self._recent.extend([observation] * windows)
        self._before = standing
        if self._excesses and len(self._excesses[-1]) != len(observation.excess_seconds):
            self._excesses.clear()
        self._excesses.append(observation.excess_seconds)
        self._gather_stacks(observation)
        self._unremarkable = 0 if observation.remarkable else self._unremarkable + 1
        if not observation.remarkable and observation.summary.step_seconds > 0:
            self._usual_steps.append(observation.summary.usual_step_seconds)
            if observation.is_asynchronous:
                self._usual_waits.append(median_or_nan(observation.columns.wait_seconds))
        verdict = self._apply_rules(observation, standing)
        if observation.is_asynchronous:
            verdict = replace(verdict, asynchronous=pace(observation.columns, verdict.culprits))
        return verdict

    def _apply_rules(self, observation: Observation, standing: Verdict) -> Verdict:
        if self._unremarkable >= len(self._recent) and not standing.kind.is_finding:
            return self._nothing()
        for rule in (
            *(self._slow_server, self._slow_ranks, self._slow_stage, self._slow_communication),
            *(self._imbalance, self._jitter, self._input_bound),
        ):
            verdict = rule()
            if verdict is not None:
                return verdict
        return self._low_mfu() or self._nothing()

    def _nothing(self) -> Verdict:
        """A fault shows after so many windows: before that, its absence does not show either."""
        if len(self._recent) >= self._policy.windows_for_alarm:
            return self._healthy()
        reason = f"{len(self._recent)} of {self._policy.windows_for_alarm} windows compared"
        return Verdict(Kind.INSUFFICIENT_DATA, reason)

    def _severity(self, windows: int) -> Severity | None:
        if windows >= self._policy.windows_for_alarm:
            return Severity.ALARM
        return Severity.WARNING if windows >= self._policy.windows_for_warning else None

    def _standing(self, kind: Kind) -> bool:
        return self._before.kind is kind and self._before.severity is Severity.ALARM

    def _slow_server(self) -> Verdict | None:
        """Before slow workers: while they wait for the server, a faster worker would only wait longer."""
        found = [o.server for o in self._recent if o.server is not None]
        if not found:
            return None
        severity = self._severity(len(found))
        if self._standing(Kind.SLOW_SERVER) and len(found) >= self._policy.windows_for_warning:
            severity = Severity.ALARM
        if severity is None:
            return None
        server, window = found[-1], [o.window for o in self._recent if o.server is not None][-1]
        usual = (
            float(np.median(self._usual_waits)) if len(self._usual_waits) >= self._policy.windows_for_alarm else None
        )
        evidence = window.evidence().get(server.culprits[0]) if window is not None and server.culprits else None
        cause = server_cause(server, evidence)
        if not cause.frames and self._before.kind is Kind.SLOW_SERVER:
            cause = replace(cause, phase=self._before.cause.phase, frames=self._before.cause.frames)
        who = f"{ranks(server.culprits)}" if server.culprits else "a server whose steps are not known"
        return Verdict(
            Kind.SLOW_SERVER,
            f"workers wait {percent(server.wait_ratio)} of the time for {who}",
            severity,
            Confidence.HIGH if server.is_sure else Confidence.LOW,
            server.culprits,
            impact_ratio=float(np.median([one.impact_ratio(usual) for one in found])),
            cause=cause,
        )

    def _slow_ranks(self) -> Verdict | None:
        seen = Counter(rank for observation in self._recent for rank in observation.outliers)
        # A fault that is over stays in the last windows for a while: only a rank that is slow now becomes one.
        possible = self._recent[-1].outliers.union(self._before.culprits if self._before.kind is Kind.SLOW_RANK else ())
        seen = Counter({rank: seen[rank] for rank in possible & seen.keys() if self._is_beyond_variation(rank)})
        alarmed = {rank for rank, count in seen.items() if count >= self._policy.windows_for_alarm}
        if self._standing(Kind.SLOW_RANK):
            lingering = Counter(
                rank for observation in self._recent for rank in observation.outliers | observation.lingering
            )
            alarmed |= {r for r in self._before.culprits if lingering[r] >= self._policy.windows_for_warning}
        stalls = self._recent[-1].stalls.of_ranks
        alarmed.update(stalls.ranks if stalls is not None else ())
        warned = {rank for rank, count in seen.items() if count >= self._policy.windows_for_warning}
        culprits = tuple(sorted(alarmed or warned))
        if not culprits:
            return None
        # A rank alone works longer than before, and may have more to do.
        is_alarm = bool(alarmed) and not self._is_alone
        return self._slow_rank_verdict(culprits, Severity.ALARM if is_alarm else Severity.WARNING)

    def _is_beyond_variation(self, rank: int) -> bool:
        """Whether the excess of a rank exceeds what excesses vary by from window to window. Changes between windows do
        not depend on when a fault began. Only hosts are this noisy, and captures are compared step by step."""
        flagged = [o for o in self._recent if rank in o.outliers]
        latest = flagged[-1]
        row = int(np.flatnonzero(latest.columns.rank == rank)[0])
        is_captured = latest.window is not None and latest.window.is_captured
        is_exempt = is_captured or latest.is_asynchronous or latest.screen is None
        if is_exempt or is_timed_on_device(latest.columns)[row]:
            return True
        assert latest.screen is not None
        if latest.screen.starved[row] and is_contended(latest.summary, self._policy):
            # Ranks that share CPUs queue in turn, each for seconds: only one that queues all the time is starved.
            return sum(rank in o.outliers | o.lingering for o in self._recent) >= self._policy.windows_kept
        changes = np.abs(np.diff(self._excesses, axis=0))
        cohort = latest.columns.stage == latest.columns.stage[row]
        if len(changes) * max(np.count_nonzero(cohort) - 1, 1) < MIN_CHANGES:
            return False
        usual = MAD_TO_SIGMA * max(median_or_nan(changes[:, row]), median_or_nan(changes[:, cohort].ravel()))
        # The machine may have become noisy a few windows ago. The largest change may be the beginning of the fault.
        latest_changes = np.sort(changes[1 - len(self._recent) :, row])[:-1]
        recent = math.sqrt(float(np.sum(latest_changes**2)) / max(len(latest_changes), 1))
        sigma = max(usual, recent) / math.sqrt(2)
        excess = float(np.mean([o.excess_seconds[o.columns.rank == rank] for o in flagged]))
        return excess >= FIXED.variation_score * sigma

    def _slow_rank_verdict(self, culprits: tuple[int, ...], severity: Severity) -> Verdict:
        stalls = self._recent[-1].stalls.of_ranks
        if stalls is not None and not set(stalls.ranks) & set(culprits):
            stalls = None
        slow = [one for one in self._recent if one.outliers.intersection(culprits)]
        # Windows without a stall show nothing of its cause.
        stalled = [one for one in self._recent if stalls is not None and one.late.keys() & set(culprits)]
        flagged = stalled or slow
        if not flagged:
            return replace(self._before, severity=severity)
        last, screened = flagged[-1].window, flagged[-1].screen
        assert last is not None and screened is not None  # an outlier was seen in it
        columns = last.columns
        rows = np.isin(columns.rank, culprits)
        # A recording of stacks ends after the stall that it shows, in another window.
        shown = [*self._recent] if stalls is not None else flagged
        cause = self._cause([one.window for one in shown if one.window], columns, screened, culprits)
        # Not the mean: the fault began within one of the windows.
        impacts = [one.impact_ratio - (one.long_steps_impact_ratio if stalls is not None else 0.0) for one in slow]
        is_usual = stalls is None or len(impacts) >= self._policy.windows_for_alarm
        impact = self._against_the_past(float(np.median(impacts)), columns) if is_usual and impacts else 0.0
        if stalls is not None:
            impact = min(1.0, impact + stalls.impact_ratio)
            cause = replace(cause, stalls=str(stalls))
        own, usual = median_or_nan(screened.compared_seconds[rows]), median_or_nan(screened.reference_seconds[rows])
        group = _place_of(columns.rank[rows].tolist(), last)
        whose = "earlier in the run" if self._is_alone else "of its peers"
        what = f"{milliseconds(own)} of own work a step against {milliseconds(usual)} {whose}"
        if stalls is not None:
            what = f"stalls {stalls}, while its peers wait for it"
        of = "the run's updates" if flagged[-1].is_asynchronous else "the job's time"
        reason = f"{group or ranks(culprits)}: {what}; without that, {percent(impact)} of {of} would come back"
        return Verdict(
            Kind.SLOW_RANK, reason, severity, Confidence.HIGH, culprits, group=group, impact_ratio=impact, cause=cause
        )

    def _against_the_past(self, impact: float, columns: RankColumns) -> float:
        """A rank that is late hides some communication, and makes other communication slower. Where the job's past is
        known, and the rank's excess is about what the job has lost since, that loss is what would come back."""
        step = median_or_nan(columns.usual_step_seconds)
        is_other = self._is_alone or self._recent[-1].is_asynchronous
        if len(self._usual_steps) < self._policy.windows_for_alarm or not step > 0 or is_other:
            return impact
        slowdown = 1 - float(np.median(self._usual_steps)) / step
        if slowdown < self._policy.impact_ratio:
            return impact
        is_alike = min(impact, slowdown) >= FIXED.impact_alike_ratio * max(impact, slowdown)
        return slowdown if is_alike else impact

    def _cause(
        self, windows: list[JobWindow], columns: RankColumns, screened: Screen, culprits: tuple[int, ...]
    ) -> Cause:
        """Once the same ranks are culprits for a while, the cause is looked for only now and then: reading stacks is
        most of what a slow job costs."""
        before = self._before
        same = before.kind is Kind.SLOW_RANK and before.culprits == culprits
        self._cause_age = self._cause_age + 1 if same else 0
        period = max(CAUSE_KEPT_WINDOWS, self._policy.windows_kept)
        # A stall, and a recording that shows it, come now and then only.
        is_sought = bool(before.cause.stalls) and not before.cause.frames
        if self._cause_age > self._policy.windows_kept and self._cause_age % period and not is_sought:
            return before.cause
        rows = np.isin(columns.rank, culprits)
        evidence = merge_evidence(windows, _witnesses(columns, screened, rows))
        stacks = {rank: e.stacks for rank, e in evidence.items() if e.stacks is not None}
        gpus = {rank: e.gpu for rank, e in evidence.items() if e.gpu is not None}
        ranges = {rank: e.ranges for rank, e in evidence.items() if e.ranges}
        if not same:
            self._history = StackHistory()
        if self._cause_age % period == 0 and not windows[-1].is_captured:  # so no window is counted twice
            self._history.add(stacks)
        screened = with_stalls(screened, columns, self._policy)
        cause = name_cause(columns, screened, rows, stacks, self._policy, gpus, self._history, ranges)
        is_other = (cause.bound, cause.phase) != (before.cause.bound, before.cause.phase)
        self._other_causes = self._other_causes + 1 if same and is_other else 0
        if not same:
            return cause
        # Noise may hide the phase for a window, and stacks are recorded only now and then: while the culprits are the
        # same, a cause that was named stays until there is a better one.
        was_named = before.cause.phase != "unknown"
        # Few recordings of stacks hold a stall.
        is_rare = was_named and bool(before.cause.stalls)
        is_vague = cause.phase == "unknown" and (is_rare or cause.bound in ("", before.cause.bound))
        if is_vague or (was_named and 0 < self._other_causes < CAUSE_CHANGES_AFTER):
            return before.cause
        if not cause.frames and not is_other:
            return replace(cause, frames=before.cause.frames)
        return cause

    def _slow_stage(self) -> Verdict | None:
        seen = Counter(o.stage.stage for o in self._recent if o.stage)
        stage, count = max(seen.items(), key=lambda item: item[1], default=(-1, 0))
        severity = self._severity(count)
        if self._standing(Kind.SLOW_STAGE) and self._before.stage is not None:
            still = [f.stage for o in self._recent if (f := o.stage or o.stage_lingering)]
            if still.count(self._before.stage) >= self._policy.windows_for_warning:
                stage, severity = self._before.stage, Severity.ALARM
        if severity is None:
            return None
        found = [o.stage for o in self._recent if o.stage and o.stage.stage == stage]
        if not found:
            return self._before
        return SlowStage.verdict(found, severity)

    def _slow_communication(self) -> Verdict | None:
        found = [o.transfer for o in self._recent if o.transfer]
        if not found:
            return None
        typical = SlowTransfer.typical(found)
        cause = Cause("communication", (), typical.evidence)
        network = next((o.network for o in reversed(self._recent) if o.network), "")
        if network:
            cause = Cause(NETWORK, (), network)
        elif self._before.kind is Kind.SLOW_COMMUNICATION and self._before.cause.phase == NETWORK:
            cause = self._before.cause  # an error that was counted is over a minute later, its effect may not be
        impacts = [one.impact_ratio for one in found]
        verdict = self._everyone(Kind.SLOW_COMMUNICATION, impacts, typical.reason, cause)
        return verdict and replace(verdict, group=typical.where, links=typical.links)

    def _imbalance(self) -> Verdict | None:
        found = [o.imbalance_impact_ratio for o in self._recent if o.imbalance_impact_ratio is not None]
        if not found:
            return None
        if len(found) < self._policy.windows_for_alarm and not self._standing(Kind.DATA_IMBALANCE):
            return None  # a fault of one rank looks like it while it begins
        tokens = [o.tokens for o in self._recent if o.tokens is not None]
        if len(tokens) * 2 < len(found):
            return self._everyone(Kind.DATA_IMBALANCE, found, UNEVEN.reason, UNEVEN.cause)
        cause = Cause("unknown", (), str(tokens[-1]))
        reason = f"{tokens[-1]}: the experts are unbalanced, and no rank is slow for its tokens"
        return self._everyone(Kind.DATA_IMBALANCE, found, reason, cause)

    def _jitter(self) -> Verdict | None:
        stalls = self._recent[-1].stalls.in_turn
        if stalls is None:
            return None
        everybody = len(self._recent[-1].columns)
        evidence = f"{stalls.stalled_ranks} of {everybody} ranks stall in turn, one of them {stalls}"
        reason = f"{evidence}; without that, {percent(stalls.impact_ratio)} of the job's time would come back"
        cause = Cause("unknown", self._stalled_lines(together=False), evidence, stalls=str(stalls))
        if not cause.frames and self._standing(Kind.JITTER):
            cause = replace(cause, frames=self._before.cause.frames)
        return Verdict(Kind.JITTER, reason, Severity.ALARM, impact_ratio=stalls.impact_ratio, cause=cause)

    def _gather_stacks(self, observation: Observation) -> None:
        """While ranks stall in turn or together, there is no rank to compare with."""
        window, stalls = observation.window, observation.stalls
        if window is None:
            return
        if observation.is_moment_for_stacks and not observation.outliers:
            evidence = window.evidence()
            asked = (evidence.get(rank) for rank in observation.columns.rank[:USUAL_RANKS_ASKED].tolist())
            for stacks in [one.stacks for one in asked if one is not None and one.stacks is not None]:
                self._usual_stacks.add({0: stacks})
        for together, found in ((False, stalls.in_turn), (True, stalls.together)):
            if found is None:
                self._lines.pop(together, None)
                continue
            if together not in self._lines:
                on_device = bool(is_timed_on_device(observation.columns).all())
                waiting = HOST_WAITING_PHASES if on_device else WAITING_PHASES
                self._lines[together] = StallLines(self._usual_stacks.ranks.get(0), waiting)
            by_rank, by_all = ({}, observation.lost_by_all_seconds) if together else (observation.late, 0.0)
            self._lines[together].add(window, by_rank, by_all)

    def _stalled_lines(self, together: bool) -> tuple[FrameSeen, ...]:
        return self._lines[together].found() if together in self._lines else ()

    def _healthy(self) -> Verdict:
        """Long steps of all ranks together are no fault of a rank, but may cost more than one."""
        together = self._recent[-1].stalls.together
        if together is None:
            return HEALTHY
        frames = self._stalled_lines(together=True)
        who = "the rank stalls" if self._is_alone else "all ranks together stall"
        lost = f"{who} {together}, {percent(together.impact_ratio)} of the time"
        where = f", in {frames[0].phase} at {source_line(frames[0])} ({frames[0].function})" if frames else ""
        return replace(HEALTHY, cause=Cause(frames[0].phase if frames else "unknown", frames, f"{lost}{where}"))

    def _input_bound(self) -> Verdict | None:
        shares = [o.summary.input_ratio for o in self._recent]
        found = [share for share in shares if share >= self._policy.input_bound_ratio]
        if not found:
            return None
        who, whose = ("the rank waits", "the rank") if self._is_alone else ("all ranks wait", "every rank")
        reason = f"{who} for data, {percent(found[-1])} of each step"
        return self._everyone(Kind.INPUT_BOUND, found, reason, Cause("input", (), f"data loader wait of {whose}"))

    def _low_mfu(self) -> Verdict | None:
        target = self._policy.mfu_target_ratio
        known = [o.summary.mfu_ratio for o in self._recent if target and o.summary.mfu_ratio < target]
        if not known or target is None:
            return None
        reason = f"MFU {percent(known[-1])} is below the target of {percent(target)}"
        return self._everyone(Kind.LOW_MFU, [1 - mfu / target for mfu in known], reason, Cause())

    @property
    def _is_alone(self) -> bool:
        return len(self._recent[-1].columns.rank) == 1

    def _everyone(self, kind: Kind, impacts: Iterable[float], reason: str, cause: Cause) -> Verdict | None:
        """A verdict that names no rank, if enough of the last windows have the finding."""
        found = list(impacts)
        severity = self._severity(len(found))
        if self._standing(kind) and len(found) >= self._policy.windows_for_warning:
            severity = Severity.ALARM
        if severity is None:
            return None
        return Verdict(kind, reason, severity, Confidence.HIGH, impact_ratio=float(np.mean(found)), cause=cause)


def _witnesses(columns: RankColumns, screened: Screen, culprits: Bools) -> list[int]:
    """The slowest culprit, for which a cause is looked for, and peers from all over its cohort."""
    slowest = screened.slowest(culprits)
    peers = np.flatnonzero(peers_of(columns, culprits, slowest))
    asked = peers[np.linspace(0, len(peers) - 1, min(len(peers), PEERS_ASKED)).astype(np.int64)]
    return [int(columns.rank[slowest]), *columns.rank[asked].tolist()]


def _place_of(culprits: list[int], window: JobWindow) -> str:
    """Name of the node with exactly the culprits as its ranks; empty if there is no such node."""
    columns = window.columns
    places = set(columns.place[np.isin(columns.rank, culprits)].tolist())
    if len(culprits) < 2 or len(places) != 1 or len(np.unique(columns.place)) < 2:
        return ""
    place = places.pop()
    if set(columns.rank[columns.place == place].tolist()) != set(culprits):
        return ""
    return f"node {window.place_names.get(place, place)}"


class Damper:
    """Keeps a job's verdict from flipping between kinds. Persistence and hysteresis within a kind are the rules' own.

    - A standing alarm gives way to a finding of another kind when that has become an alarm, and at once to one that
      explains it: data looks uneven while a rank becomes slow.
    - Doubt (`insufficient_data`) must persist as long as an alarm before it replaces an answer.
    - What comes back soon after it went is still there: it stays until it has not been seen for a minute. Meanwhile
      only an alarm that names ranks replaces it."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._window = 0
        self._doubts = 0  # windows in a row
        self._left: dict[Kind, int] = {}  # the window in which each kind last ended
        self._seen = 0  # the window in which the rules last confirmed the standing verdict
        self._came_back = False
        self._has_answered = False

    def settle(self, found: Verdict, standing: Verdict) -> Verdict:
        """The verdict after one more window, for which the rules give `found`."""
        self._window += 1
        self._doubts = self._doubts + 1 if found.kind is Kind.INSUFFICIENT_DATA else 0
        if found.kind is standing.kind:
            self._seen = self._window
            return found
        if self._is_premature(found, standing):
            return standing
        if self._has_answered and standing.kind is not Kind.HEALTHY:
            self._left[standing.kind] = self._window
        self._has_answered = True
        self._came_back = found.kind is not Kind.HEALTHY and self._is_recent(self._left.get(found.kind))
        self._seen = self._window
        return found

    def _is_premature(self, found: Verdict, standing: Verdict) -> bool:
        if standing.kind is Kind.HANG:
            return False  # a job moves, or it does not
        if found.kind is Kind.INSUFFICIENT_DATA:
            return self._doubts < self._policy.windows_for_alarm
        if standing.kind is Kind.DATA_IMBALANCE and found.kind in EXPLAINS_UNEVEN:
            return False
        is_held = self._came_back and self._is_recent(self._seen)
        if found.kind is Kind.HEALTHY or not standing.kind.is_finding:
            return is_held and not found.kind.is_finding
        if is_held:
            return not (found.is_alarm and found.culprits)
        return standing.is_alarm and not found.is_alarm

    def _is_recent(self, window: int | None) -> bool:
        return window is not None and self._window - window < self._policy.windows_damped
