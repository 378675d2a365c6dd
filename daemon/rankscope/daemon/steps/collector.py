"""The steps collector: what the probe wrote about each training step since the last window."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from rankscope.analysis.stats.long_steps import find_long
from rankscope.analysis.stats.robust import Ints
from rankscope.daemon import procfs
from rankscope.daemon.collector import Collector, blocked
from rankscope.daemon.config import Config
from rankscope.daemon.procfs import DescriptorSearch, RingSearch
from rankscope.daemon.samples import GroupSpan, ProbeFacts, Problem, RankKey, RankProcess, Span, StepSample
from rankscope.daemon.steps import long_steps, ring_reader, step_columns
from rankscope.daemon.steps.host_pace import HostSteps
from rankscope.daemon.steps.long_steps import Mask, RecentSteps
from rankscope.daemon.steps.nccl_inspector import InspectorLog
from rankscope.daemon.steps.nccl_times import NcclProgress, NcclTimes, read_nccl
from rankscope.daemon.steps.ring_reader import RingError
from rankscope.daemon.steps.step_operations import Role
from rankscope.daemon.steps.unmarked_steps import PeriodProgress, read_unmarked_steps
from rankscope.probe import nccl_plugin, ring_layout

MAX_STEPS_PER_SECOND = 1_000_000
MAX_BYTES = 1 << 50
MAX_COUNTER = 1 << 53
# A host gets ahead in its first steps, while the device loads kernels and NCCL connects, and has another pace then.
WARM_UP_STEPS = 64
# A rank with many descriptors and no ring is searched less and less often, after this many windows at the latest.
WINDOWS_LEFT_OUT = 8
NO_NUMBERS: Ints = np.zeros(0, dtype=np.int64)


def wall_minus_monotonic_ns() -> int:
    return time.time_ns() - time.monotonic_ns()


@dataclass(frozen=True)
class _Progress:
    """How far a ring has been read. `next_sequence` is None before the first read."""

    ring_id: int
    inspector: InspectorLog
    next_sequence: int | None = None
    steps: int = 0
    facts: ProbeFacts = field(default_factory=ProbeFacts)
    monotonic_offset_ns: int = 0  # of the process' time namespace
    last_step_ns: int | None = None  # on the process' monotonic clock
    groups: Mapping[tuple[int, int], tuple[int, float, float]] = field(default_factory=dict)
    ranges: step_columns.RangeTotals = field(default_factory=dict)
    nccl: NcclProgress = field(default_factory=NcclProgress)
    recent: RecentSteps = field(default_factory=RecentSteps)
    host: HostSteps = field(default_factory=HostSteps)


class StepsCollector(Collector[StepSample]):
    """A rank without a ring has no entry, unless its operations have a period: it runs without the probe, or nothing in
    it ends a step. Neither is a problem."""

    name = "steps"

    def __init__(
        self, proc_root: Path = Path("/proc"), wall_minus_monotonic_ns: Callable[[], int] = wall_minus_monotonic_ns
    ) -> None:
        self._proc_root = proc_root
        # Ours, because the process' own may be from before the clock was set.
        self._wall_minus_monotonic_ns = wall_minus_monotonic_ns
        self._progress: dict[RankKey, _Progress] = {}
        self._searches: dict[RankKey, RingSearch] = {}
        self._periods: dict[RankKey, PeriodProgress] = {}
        self._nccl_searches: dict[RankKey, DescriptorSearch] = {}

    @classmethod
    def from_config(cls, config: Config) -> StepsCollector:
        return cls(Path(config.proc_root))

    def collect(self, ranks: Sequence[RankProcess], span: Span) -> Mapping[RankKey, StepSample | Problem]:
        self._searches = {
            rank.key: self._searches.get(rank.key) or RingSearch(f"{self._proc_root}/{rank.pid}", WINDOWS_LEFT_OUT)
            for rank in ranks
        }
        self._progress = {key: progress for key, progress in self._progress.items() if key in self._searches}
        self._periods = {key: progress for key, progress in self._periods.items() if key in self._searches}
        self._nccl_searches = {key: search for key, search in self._nccl_searches.items() if key in self._searches}
        found: dict[RankKey, StepSample | Problem] = {}

        def read(rank: RankProcess) -> None:
            try:
                sample = self._read(rank, span)
                if sample is not None:
                    found[rank.key] = sample
            except RingError as error:
                found[rank.key] = self._problem(rank, error.kind, str(error))
            except OSError as error:
                found[rank.key] = self._problem(rank, "unreadable", f"the ring could not be read: {error}")

        for rank in procfs.BLOCKING.each(ranks, lambda rank: f"{self._proc_root}/{rank.pid}", read):
            found[rank.key] = blocked(self.name, rank)
        return found

    def _clock_ns(self, span: Span) -> int:
        """The wall clock less the monotonic one; if it was set after the window had ended, as it was before."""
        clock_ns = self._wall_minus_monotonic_ns()
        since_end_ns = clock_ns + time.monotonic_ns() - span.end_unix_nanos
        return clock_ns if abs(since_end_ns) < step_columns.FUTURE_NS else clock_ns - since_end_ns

    def _problem(self, rank: RankProcess, kind: str, text: str) -> Problem:
        return Problem(self.name, kind, f"{rank}: {text}")

    def _read(self, rank: RankProcess, span: Span) -> StepSample | None:
        fd = ring_reader.open_found(self._searches[rank.key])
        if fd is None:
            self._progress.pop(rank.key, None)
            return self._read_unmarked(rank, span)
        for known in (self._periods, self._nccl_searches):
            known.pop(rank.key, None)
        try:
            header = ring_reader.read_header(fd)
            own_pid = rank.namespace_pids[-1] if rank.namespace_pids else rank.pid
            if header.owner_pid != own_pid:
                text = f"the ring belongs to pid {header.owner_pid}, this process is {own_pid}; ignored"
                raise RingError("owner", text)
            if header.disabled:
                raise RingError("disabled", "the probe has disabled itself; its reason is on the process' stderr")
            progress = self._progress_of(rank, header, span)
            clock_ns = self._clock_ns(span) - progress.monotonic_offset_ns
            process = f"{self._proc_root}/{rank.pid}"
            sample, self._progress[rank.key] = _sample(fd, header, progress, span, clock_ns, rank, process)
            return sample
        finally:
            os.close(fd)

    def _read_unmarked(self, rank: RankProcess, span: Span) -> StepSample | None:
        """Memory of NCCL's plugin that cannot be right is as none."""
        process = f"{self._proc_root}/{rank.pid}"
        search = self._nccl_searches.setdefault(rank.key, procfs.nccl_search(process, WINDOWS_LEFT_OUT))
        before = self._periods.pop(rank.key, PeriodProgress())
        try:
            link = search.look()
            if link is None:
                return None
            offset_ns = procfs.monotonic_offset_ns(process) - procfs.monotonic_offset_ns("/proc/self")
            role = Role(rank.rank, rank.world_size, NO_NUMBERS, self._clock_ns(span) - offset_ns)
            own_pid = rank.namespace_pids[-1] if rank.namespace_pids else rank.pid
            sample, self._periods[rank.key] = read_unmarked_steps(link, own_pid, before, role, span.start_unix_nanos)
        except (OSError, RingError):
            return None
        return sample

    def _progress_of(self, rank: RankProcess, header: ring_reader.Header, span: Span) -> _Progress:
        """Where to continue. After an exec the same process has another ring."""
        key = rank.key
        before = self._progress.get(key)
        if max(header.records, header.steps) > MAX_COUNTER:
            raise RingError("corrupt", f"the ring claims {header.records} records of {header.steps} steps")
        if before is None or before.next_sequence is None or before.ring_id != header.ring_id:
            process = f"{self._proc_root}/{rank.pid}"
            offset_ns = procfs.monotonic_offset_ns(process) - procfs.monotonic_offset_ns("/proc/self")
            return _Progress(header.ring_id, InspectorLog(process, header.owner_pid), monotonic_offset_ns=offset_ns)
        at_most = ring_layout.CAPACITY + max(1.0, span.seconds) * MAX_STEPS_PER_SECOND
        new_records, new_steps = header.records - before.next_sequence + 1, header.steps - before.steps
        if not (0 <= new_records <= at_most and 0 <= new_steps <= at_most):
            del self._progress[key]
            text = f"{before.next_sequence - 1} records of {before.steps} steps to {header.records} of {header.steps}"
            raise RingError("corrupt", f"the ring's counters went from {text}; starting over")
        return before


def _sample(
    fd: int,
    header: ring_reader.Header,
    progress: _Progress,
    span: Span,
    clock_ns: int,
    rank: RankProcess,
    process: str,
) -> tuple[StepSample, _Progress]:
    """`clock_ns` is the wall clock less the process' monotonic clock; `process` its folder in /proc."""
    live = ring_reader.read_live(fd)
    facts = ring_reader.read_facts_text(fd)
    if facts is not None:
        progress = replace(progress, facts=ring_reader.parse_facts(facts))
    oldest = max(1, header.records - ring_layout.CAPACITY + 1)
    first = max(oldest, progress.next_sequence or oldest)
    records, whole = ring_reader.read_records(fd, first, header.records)
    # Records that the writer overwrites during the read are lost, not corrupt, including the slot that it may be
    # writing now.
    reached = max(0, ring_reader.read_header(fd).records - ring_layout.CAPACITY + 2 - first)
    records, whole = records[reached:], whole[reached:]

    ends = step_columns.ends_unix_nanos(records, clock_ns)
    good = whole & step_columns.plausible(records, ends, span.end_unix_nanos)
    if len(records) and not good.any():
        raise RingError("corrupt", f"none of {len(records)} new records has a valid checksum and content")

    # DDP's figures of the newest step come with the next step: hold it back until then.
    held_back = bool(len(records)) and bool(good[-1]) and bool(records["flags"][-1] & ring_layout.FLAG_DDP)
    wanted = good & (records["span_ns"] > 0)
    if held_back:
        wanted[-1] = False
    steps_held_back = int(records["steps"][-1]) if held_back else 0
    if progress.next_sequence is None:
        # The ring may hold an hour of history before the first window.
        wanted &= ends >= span.start_unix_nanos
        lost = 0
    else:
        lost = max(0, header.steps - progress.steps - int(records["steps"][good].sum()))
    kept = step_columns.newest(records, wanted)
    step_seconds = records["span_ns"][kept] * 1e-9 / records["steps"][kept]
    is_long = find_long(progress.recent.step_seconds, step_seconds)
    role = Role(rank.rank, rank.world_size, _step_numbers(header, records)[kept], clock_ns)
    nccl, nccl_progress = _nccl(process, header.owner_pid, progress, records[kept], is_long, role)
    groups, totals = step_columns.group_spans(ring_reader.read_groups(fd), progress.groups)
    ranges, range_totals = step_columns.range_seconds(ring_reader.read_ranges(fd), progress.ranges)
    untold = _untold_messages(nccl, groups) if progress.inspector.is_found else ()
    if untold:
        nccl = replace(nccl, wait_seconds=None)
    rows = step_columns.columns(records, good, kept, nccl.seconds)
    first_rows = np.cumsum(records["steps"][kept]) - records["steps"][kept]
    wait_seconds = rows.wait_seconds[first_rows] if nccl.wait_seconds is None else nccl.wait_seconds
    bounding_seconds = step_columns.bounding_seconds(records[kept])
    if nccl.wait_seconds is None and nccl_progress.read is not None:
        # NCCL takes turns. What is sampled in between covers other operations: of a long step, it shows nothing.
        wait_seconds = np.full(len(wait_seconds), np.nan)
    # In the collectives that torch issues on a device, waiting is sampled.
    is_sampled = bool((records["flags"][kept] & ring_layout.FLAG_DEVICE).any())
    is_sampled &= nccl.wait_seconds is None and nccl_progress.read is None
    found_long = (
        None
        if is_sampled
        else long_steps.sum_up(
            is_long,
            progress.recent,
            step_seconds,
            long_steps.bound_waits(is_long, progress.recent, step_seconds, wait_seconds, bounding_seconds),
            rows.checkpoint_seconds[first_rows],
            rows.run_ahead_seconds[first_rows],
        )
    )
    is_blind = bool(len(records)) and bool(records["flags"][-1] & ring_layout.FLAG_BLIND)
    if nccl.groups:
        # NCCL knows all collectives of all steps. What others add is which of them nothing hides.
        exposed = (span for span in groups if span.kind in step_columns.EXPOSED_KINDS and not is_blind)
        groups = (*nccl.groups, *exposed, *untold)
        is_blind = False
    elif is_blind:
        # The spans cover only some collectives, and the flight recorder's durations include those too.
        groups = tuple(
            span for span in groups if span.kind not in (ring_layout.GROUP_EXPOSED, ring_layout.GROUP_OVERLAPPED)
        )
    host = progress.host
    if progress.steps >= WARM_UP_STEPS:
        ahead = rows.run_ahead_seconds[first_rows]
        host = host.followed_by(rows.host_seconds[first_rows], step_seconds, ahead, records["steps"][kept])
    last_step_ns = int(records["end_ns"][good][-1]) if len(records) else progress.last_step_ns
    counted = _bounded(live, ring_layout.COLLECTIVES, MAX_COUNTER)
    sample = StepSample(
        **vars(rows),
        steps_total=header.steps,
        steps_lost=lost,
        last_step_unix_nanos=None if last_step_ns is None else last_step_ns + clock_ns,
        facts=progress.facts,
        figures=host.pace(),
        memory=_bounded(live, ring_layout.MEMORY, MAX_BYTES),
        collectives_enqueued=counted.get("collectives_enqueued"),
        collectives_completed=counted.get("collectives_completed"),
        groups=groups if progress.next_sequence is not None else (),
        ranges=ranges if progress.next_sequence is not None else {},
        collectives=nccl.collectives,
        is_blind=is_blind,
        long_steps=found_long,
        communicators=nccl.communicators,
        operations=nccl.operations,
        is_inspected=progress.inspector.is_found,
    )
    return sample, replace(
        progress,
        recent=progress.recent.followed_by(step_seconds, wait_seconds, bounding_seconds),
        host=host,
        next_sequence=header.records + (0 if held_back else 1),
        steps=header.steps - steps_held_back,
        last_step_ns=last_step_ns,
        groups=totals,
        ranges=range_totals,
        nccl=nccl_progress,
    )


def _step_numbers(header: ring_reader.Header, records: ring_reader.Records) -> Ints:
    """The number of the last step of each record, counted back from the newest."""
    steps = records["steps"].astype(np.int64)
    return header.steps - np.cumsum(steps[::-1])[::-1] + steps


def _nccl(
    process: str, owner_pid: int, progress: _Progress, records: ring_reader.Records, is_long: Mask, role: Role
) -> tuple[NcclTimes, NcclProgress]:
    """What NCCL told of these steps, our plugin or the user's. Memory that cannot be right is as none: the steps are
    known all the same."""
    descriptor = progress.facts.nccl_descriptor
    try:
        if progress.facts.nccl_reason == nccl_plugin.OTHER:
            return progress.inspector.read(role.clock_ns, records, is_long), progress.nccl
        if descriptor is None:
            return NcclTimes(), progress.nccl
        return read_nccl(f"{process}/fd/{descriptor}", owner_pid, progress.nccl, records, is_long, role)
    except (OSError, RingError):
        return NcclTimes(), NcclProgress()


def _untold_messages(nccl: NcclTimes, groups: Sequence[GroupSpan]) -> tuple[GroupSpan, ...]:
    """The probe's spans of messages, where NCCL told of none: an Inspector of before NCCL 2.30."""
    kind = ring_layout.GROUP_POINT_TO_POINT
    is_told = any(span.kind == kind for span in nccl.groups)
    return () if is_told else tuple(span for span in groups if span.kind == kind)


def _bounded(live: Mapping[str, int], names: Sequence[str], limit: int) -> dict[str, int]:
    return {name: live[name] for name in names if 0 <= live.get(name, -1) <= limit}
