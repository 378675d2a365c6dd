"""Writes rings in this process, rightly and wrongly, and looks at them with the collector."""

from __future__ import annotations

import os
import time
import zlib

from rankscope.daemon.samples import Problem, RankProcess, Span, StepSample
from rankscope.daemon.steps.collector import StepsCollector
from rankscope.probe import ring_layout
from rankscope.probe.ring import Ring

MS = 1_000_000
HEADER_NAMES = ("magic", "version", "header_bytes", "record_bytes", "capacity", "owner_pid", "ring_id")
NAN4 = (float("nan"),) * 4
ME = RankProcess(
    job="j", rank=3, local_rank=0, world_size=4, pid=os.getpid(), start_ticks=1, namespace_pids=(os.getpid(),)
)


def window(seconds: float = 600.0) -> Span:
    """Long: a test may be late, and a collector leaves out what was before its first window."""
    now = time.time_ns()
    return Span(now - int(seconds * 1e9), now)


class Writer:
    """A probe's ring in this process, with access to its bytes."""

    def __init__(self) -> None:
        self.ring = Ring()
        self.end_ns = time.monotonic_ns() - 1000 * MS
        self.write = self.ring._memory

    def step(
        self,
        milliseconds: float = 10,
        *,
        blocking: float = 0.0,
        input_: float = 0.0,
        ddp: tuple[float, float, float, float] = NAN4,
        flags: int = 0,
        steps: int = 1,
        device: tuple[float, float, float] = NAN4[:3],
        backward: float = float("nan"),
        ahead: float = 0.0,
    ) -> None:
        """`device`: the host's time, its run-ahead, and exposed communication. `ahead`: milliseconds from the host's
        end of the step to that of the device."""
        span_ns = int(milliseconds * MS)
        self.end_ns += span_ns
        seconds = {
            "input_seconds": input_,
            "blocking_seconds": blocking,
            "optimizer_seconds": 0.001,
            "checkpoint_seconds": 0.0,
            "in_backward_seconds": backward,
            **dict(zip(ring_layout.DDP_SECONDS, ddp, strict=True)),
            **dict(zip(("host_seconds", "run_ahead_seconds", "exposed_seconds"), device, strict=True)),
        }
        self.ring.append(self.end_ns, span_ns, seconds, flags, steps, self.end_ns - int(ahead * MS))

    def rewrite(self, number: int, **changes: float) -> None:
        """Record `number` with other values and a right checksum."""
        offset = ring_layout.HEADER_BYTES + (number - 1) % ring_layout.CAPACITY * ring_layout.RECORD_BYTES
        values = (
            dict(zip(ring_layout.RECORD.formats, ring_layout.RECORD.unpack_from(self.write, offset), strict=True))
            | changes
        )
        body = ring_layout.RECORD.pack(*values.values())
        self.write[offset : offset + ring_layout.RECORD_BYTES] = body + ring_layout.CHECKSUM.pack(zlib.crc32(body))

    def rewrite_facts(self, text: bytes, length: int | None = None) -> None:
        head = ring_layout.FACTS_HEAD.pack(len(text) if length is None else length, zlib.crc32(text))
        self.write[ring_layout.FACTS_OFFSET : ring_layout.FACTS_OFFSET + len(head) + len(text)] = head + text

    def rewrite_counters(self, records: int, steps: int) -> None:
        ring_layout.COUNTERS.pack_into(self.write, ring_layout.COUNTERS_OFFSET, records, steps)

    def rewrite_header(self, **changes: object) -> None:
        names = HEADER_NAMES
        values = dict(zip(names, ring_layout.FIXED.unpack_from(self.write, 0), strict=True)) | changes
        fixed = ring_layout.FIXED.pack(*values.values())
        self.write[: len(fixed) + 4] = fixed + ring_layout.CHECKSUM.pack(zlib.crc32(fixed))


def sample_of(collector: StepsCollector, rank: RankProcess = ME) -> StepSample:
    found = collector.collect([rank], window())[rank.key]
    assert isinstance(found, StepSample), found
    return found


def problem_of(collector: StepsCollector, rank: RankProcess = ME) -> Problem:
    found = collector.collect([rank], window())[rank.key]
    assert isinstance(found, Problem), found
    assert found.text.startswith(f"rank {rank.rank} (pid {rank.pid}): ")
    return found
