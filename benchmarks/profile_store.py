"""The store of profiles: an hour of samples of 8 ranks at 10 Hz, written and read back; and what storing adds to the
sampling. CPU time throughout: the machine may be busy."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.reporting import Row, between
from benchmarks.running import wait_until
from benchmarks.statistics import median_of_ratios, spread_of
from rankscope.analysis.profiles.frames import Frame, Stack
from rankscope.daemon.config import Config
from rankscope.daemon.profiles.store import ProfileStore, Query
from rankscope.daemon.samples import RankProcess, Recording, Span
from rankscope.daemon.stacks.pyspy import KilledChildren
from rankscope.daemon.stacks.recording import RankRecorder
from rankscope.daemon.stacks.sampling_budget import Plan

RANKS = 8
MINUTES = 60
RATE_HERTZ = 10
RECORDING_SECONDS = 4
SECOND = 10**9
QUERIES = 9
PAIRS = 24  # of blocks of recordings without storing and with it
PACKAGES = "/usr/lib/python3.11/site-packages"
# Replaces py-spy: copies a recording to the file that --output names.
REPLAY = '#!/bin/sh\nwhile [ "$1" != --output ]; do shift; done\nexec cat "{}" > "$2"\n'


def measure() -> list[Row]:
    # A real job of DDP is seen in 20 stacks in 5 s; the hard one has a long tail of stacks that are seen a few times.
    rows = [
        *_store_rows("500 stacks", _Program(500, rare_ratio=0.1)),
        *_store_rows("20,000 stacks", _Program(20_000, rare_ratio=0.4)),
    ]
    return [*rows, _sampling_row(_Program(20_000, rare_ratio=0.4))]


class _Program:
    """A call tree as of a training job: a common trunk, a few deep parts that are seen often, and a long tail."""

    def __init__(self, stacks: int, rare_ratio: float) -> None:
        self._stacks = stacks
        self._rare_ratio = rare_ratio  # of the samples
        self._random = random.Random(17)
        self._frames = [
            Frame(f"Module{n % 23}.function_{n}", f"{PACKAGES}/torch/part{n % 60}/file_{n % 300}.py", 7 * n)
            for n in range(3000)
        ]
        self._trunk = tuple(self._frames[:15])

    def minute(self, start_unix_nanos: int) -> Iterator[Recording]:
        for offset in range(0, 60, RECORDING_SECONDS):
            start = start_unix_nanos + offset * SECOND
            span = Span(start, start + RECORDING_SECONDS * SECOND)
            for rank in range(RANKS):
                yield Recording("run", rank, span, SECOND // RATE_HERTZ, self.recorded())

    def recorded(self) -> Counter[Stack]:
        return Counter(self._stack() for _ in range(RATE_HERTZ * RECORDING_SECONDS))

    def _stack(self) -> Stack:
        """Innermost first, 30 to 60 frames. Its number decides all of it."""
        is_rare = self._random.random() < self._rare_ratio
        path = self._random.randrange(self._stacks) if is_rare else int(self._random.paretovariate(0.7)) % self._stacks
        tree = random.Random(path % 50)
        branch = [self._frames[tree.randrange(3000)] for _ in range(15 + path % 15)]
        tail = random.Random(path)
        leaf = [self._frames[tail.randrange(3000)] for _ in range(tail.randrange(15))]
        return (*reversed(leaf), *reversed(branch), *reversed(self._trunk))


def _store_rows(name: str, program: _Program) -> list[Row]:
    begin = time.time_ns() // (60 * SECOND) * 60 * SECOND
    with tempfile.TemporaryDirectory(prefix="rankscope-profiles-") as folder:
        store = ProfileStore.from_config(Config(profile_dir=folder))
        store.flush()
        costs, distinct = [], []
        for minute in range(MINUTES):
            recordings = list(program.minute(begin + minute * 60 * SECOND))
            distinct.append(len({stack for one in recordings if one.rank == 0 for stack in one.stacks}))
            costs.append(100 / 60 * _cpu_seconds(lambda recordings=recordings: _write(store, recordings)))
        status = store.status()
        samples = RANKS * MINUTES * 60 * RATE_HERTZ
        query = Query("run", Span(begin, begin + 3600 * SECOND))
        found = store.query(query).samples_total
        if (status.problem, status.samples_stored, found) != (None, samples, samples):
            raise RuntimeError(f"stored {status.samples_stored}, found {found} of {samples} samples: {status.problem}")
        times = [1e3 * _cpu_seconds(lambda: store.query(query)) for _ in range(QUERIES)]
        store.close()
    cost, query_time, stacks = spread_of(costs), spread_of(times), spread_of(distinct)
    cost_spread, stacks_spread = between(cost.low, cost.high, 3), between(stacks.low, stacks.high, 0)
    query_spread = between(query_time.low, query_time.high, 0)
    return [
        Row(f"profiles, {name}: stored, per rank and hour", status.size_bytes / RANKS / 1e6, "MB", target=5.0),
        Row(f"profiles, {name}: writing 8 ranks at 10 Hz, CPU", cost.median, "%", cost_spread, 0.1, 3),
        Row(f"profiles, {name}: query of one hour, 8 ranks, CPU", query_time.median, "ms", query_spread, 300.0, 0),
        Row(f"profiles, {name}: seen per rank and minute", stacks.median, "", stacks_spread, digits=0),
    ]


def _write(store: ProfileStore, recordings: list[Recording]) -> None:
    for recording in recordings:
        store.record(recording)
    if not store.flush(60.0):
        raise RuntimeError("the store is too slow")


def _cpu_seconds(call: Callable[[], object]) -> float:
    """Of all threads."""
    started = time.process_time()
    call()
    return time.process_time() - started


def _sampling_row(program: _Program) -> Row:
    """The collector replayed: recorders that start a program in the place of py-spy, read and sum up its output, and
    hand it to the store or to nobody, in turns. Of the sampling thread, per sample: what the store's own thread does is
    the cost of writing."""
    with tempfile.TemporaryDirectory(prefix="rankscope-profiles-") as scratch:
        folder = Path(scratch)
        store = ProfileStore.from_config(Config(profile_dir=f"{folder}/profiles"))
        replay, text = folder / "replay", folder / "recorded"
        replay.write_text(REPLAY.format(text))
        replay.chmod(0o755)
        without, storing = [], []
        for _ in range(PAIRS):
            text.write_text("".join(_raw_line(stack, count) for stack, count in program.recorded().items()))
            without.append(_sampled_seconds(replay, lambda recording: None))
            storing.append(_sampled_seconds(replay, store.record))
        status = store.status() if store.flush(60.0) else None
        store.close()
    samples = PAIRS * RANKS * RATE_HERTZ * RECORDING_SECONDS
    if status is None or status.samples_stored != samples:
        raise RuntimeError(f"stored {status} of {samples} samples")
    found = median_of_ratios(storing, without)
    micros = 1e6 / (RANKS * RATE_HERTZ * RECORDING_SECONDS)
    raw = {"without_us": [micros * one for one in without], "storing_us": [micros * one for one in storing]}
    spread = between(found.low, found.high, 3)
    return Row(
        "profiles: sampling with storing against without, CPU per sample", found.ratio, "×", spread, None, 3, raw
    )


def _sampled_seconds(replay: Path, keep: Callable[[Recording], None]) -> float:
    plan = Plan(RECORDING_SECONDS, RATE_HERTZ, RECORDING_SECONDS)
    started = time.thread_time()
    for rank in range(RANKS):
        process = RankProcess("run", rank, rank, RANKS, os.getpid(), 0, (os.getpid(),))
        recorder = RankRecorder(process, replay, KilledChildren(), keep=keep)
        recorder.start(plan, time.monotonic(), 0.0)
        _finish(recorder)
        recorder.take()
    return time.thread_time() - started


def _finish(recorder: RankRecorder) -> None:
    def has_ended() -> bool:
        recorder.poll(time.monotonic())
        return not recorder.is_running

    wait_until(has_ended, "the replay had ended")


def _raw_line(stack: Stack, count: int) -> str:
    frames = ";".join(f"{frame.function} ({frame.file}:{frame.line})" for frame in reversed(stack))
    return f"thread ({os.getpid()}): MainThread;{frames} {count}\n"
