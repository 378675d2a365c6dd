"""Keeps the windows that the daemon of a job sends, and judges them again, so that a verdict on a GPU job can be
studied, and a change of the rules tried, where there is no GPU.

    python3 -m benchmarks.gpu.window_stream gpu-results/foreign/dp4-gpu.windows.gz"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc

from rankscope.operator.correlation.correlator import TICK_SECONDS, Correlator, JobState
from rankscope.operator.correlation.daemon_windows import DaemonMessage, HeldWindow, RankSeen
from rankscope.operator.runs.daemon_streams import MAX_MESSAGE_BYTES, METHOD
from rankscope.v1.identity_pb2 import RankIdentity
from rankscope.v1.rank_service_pb2 import WatchRanksRequest

# The arrival of a message, and its size.
_HEAD = struct.Struct("<dI")


class WindowRecorder:
    """A thread that keeps each message of a daemon until the daemon goes away."""

    def __init__(self, target: str, path: Path) -> None:
        self._thread = threading.Thread(target=self._record, args=(target, path), daemon=True)
        self._thread.start()

    def _record(self, target: str, path: Path) -> None:
        options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
        with (
            gzip.open(path, "wb", compresslevel=3) as file,
            contextlib.suppress(grpc.RpcError, ValueError),
            grpc.insecure_channel(target, options) as channel,
        ):
            for message in channel.unary_stream(METHOD)(WatchRanksRequest().SerializeToString()):
                file.write(_HEAD.pack(time.time(), len(message)) + message)

    def wait(self, seconds: float) -> None:
        self._thread.join(seconds)


def kept_messages(path: Path) -> Iterator[tuple[float, bytes]]:
    """The messages with when they came, up to the first that is cut short."""
    with gzip.open(path, "rb") as file, contextlib.suppress(EOFError, struct.error):
        while True:
            unix_seconds, size = _HEAD.unpack(file.read(_HEAD.size))
            message = file.read(size)
            if len(message) < size:
                return
            yield unix_seconds, message


class Replay:
    """Judges kept windows as they were judged when they came."""

    def __init__(self, path: Path) -> None:
        self._messages = kept_messages(path)
        self._now = 0.0
        self.correlator = Correlator(clock=lambda: self._now, monotonic=lambda: self._now)
        self._ranks: dict[bytes, RankSeen] = {}

    def states(self) -> Iterator[JobState]:
        """The state of each job after each of its windows."""
        ticked = 0.0
        for unix_seconds, message in self._messages:
            ticked = ticked or unix_seconds
            while ticked + TICK_SECONDS < unix_seconds:
                ticked += TICK_SECONDS
                yield from self._tick(ticked)
            self._now = unix_seconds
            self.correlator.take(self._windows(DaemonMessage("", message)))
        yield from self._tick(ticked + TICK_SECONDS)

    def _tick(self, now: float) -> Iterator[JobState]:
        self._now = now
        if self.correlator.tick():
            yield from (state for state in self.correlator.states if state.evaluated_unix_seconds == now)

    def _windows(self, read: DaemonMessage) -> Iterator[HeldWindow]:
        figures = read.figures(len(read.windows))
        for identity, window, row in zip(read.ranks, read.windows, figures, strict=True):
            rank = self._ranks.setdefault(identity, RankSeen(RankIdentity.FromString(identity)))
            yield HeldWindow(rank, window, read.start_unix_nanos, read.end_unix_nanos, row)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    for path in parser.parse_args().files:
        print(f"## {path.name}")
        before, began = "", 0.0
        for state in Replay(path).states():
            began = began or state.evaluated_unix_seconds
            verdict, cause = state.verdict, state.verdict.cause
            gist = f"{verdict.severity.value} {verdict.kind.value} {list(verdict.culprits)} {cause.bound} {cause.phase}"
            if gist != before:
                lines = ", ".join(f"{Path(frame.file).name}:{frame.line}" for frame in cause.frames)
                impact = "" if verdict.impact_ratio is None else f" {verdict.impact_ratio:.0%}"
                seconds = state.evaluated_unix_seconds - began
                print(f"{seconds:7.1f} s  {gist}{impact}: {verdict.reason}; {cause.evidence} {cause.stalls} {lines}")
            before = gist
    return 0


if __name__ == "__main__":
    sys.exit(main())
