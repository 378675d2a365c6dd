"""Everything that a hostile or broken process could leave where its ring should be."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import struct
import subprocess
import sys
import time
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rankscope.daemon.procfs import RingSearch
from rankscope.daemon.samples import ProbeFacts, Problem, RankProcess, StepSample
from rankscope.daemon.steps import ring_reader, step_columns
from rankscope.daemon.steps.collector import StepsCollector
from rankscope.probe import ring_layout
from tests.unit.daemon.ring_writer import ME, MS, Writer, problem_of, sample_of, window


@pytest.fixture
def collector() -> StepsCollector:
    return StepsCollector()


def test_one_damaged_record_costs_one_step(writer: Writer, collector: StepsCollector) -> None:
    for _ in range(5):
        writer.step(10, flags=0, ddp=(1, 1, 1, 0))
    sample_of(collector)
    for _ in range(5):
        writer.step()
    writer.write[ring_layout.HEADER_BYTES + 6 * ring_layout.RECORD_BYTES + 20] ^= 1
    sample = sample_of(collector)
    assert (len(sample.step_seconds), sample.steps_lost) == (4, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"span_ns": -1},
        {"span_ns": 2 * 86_400 * 10**9},
        {"end_ns": -5},
        {"end_ns": 2**63 - 1},
        {"end_ns": time.monotonic_ns() + 3600 * 10**9},
        {"steps": 0},
        {"sequence": 99},
    ],
)
def test_a_record_that_cannot_be_true_is_refused(
    changes: dict[str, float], writer: Writer, collector: StepsCollector
) -> None:
    writer.step()
    writer.rewrite(1, **changes)
    assert problem_of(collector).kind == "corrupt"


def test_absurd_seconds_in_a_record_are_dropped_or_clipped(writer: Writer, collector: StepsCollector) -> None:
    for _ in range(4):
        writer.step(10)
    writer.rewrite(1, input_seconds=-1.0)
    writer.rewrite(2, input_seconds=float("inf"))
    writer.rewrite(3, input_seconds=1e6)
    writer.rewrite(4, input_seconds=5.0)
    seconds = sample_of(collector).input_seconds
    assert np.isnan(seconds[:3]).all()
    assert seconds[3] == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("counters", "kind"), [((1, 1), "corrupt"), ((2**60, 2**60), "corrupt"), ((2**50, 2**50), "corrupt")]
)
def test_counters_that_go_backwards_or_jump_are_refused(
    counters: tuple[int, int], kind: str, writer: Writer, collector: StepsCollector
) -> None:
    for _ in range(10):
        writer.step()
    sample_of(collector)
    writer.rewrite_counters(*counters)
    assert problem_of(collector).kind == kind
    writer.step()
    assert sample_of(collector).steps_total == 11


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"version": 9}, "version", "ring version 9 is newer than this daemon's 4; upgrade the daemon"),
        ({"magic": b"SOMETHIN"}, "corrupt", "SOMETHIN"),
        ({"capacity": 2**31}, "corrupt", "sizes"),
        ({"record_bytes": 1}, "corrupt", "sizes"),
        ({"owner_pid": 1}, "owner", "belongs to pid 1"),
    ],
)
def test_a_header_that_is_not_ours_is_named(
    changes: dict[str, object], kind: str, words: str, writer: Writer, collector: StepsCollector
) -> None:
    writer.step()
    writer.rewrite_header(**changes)
    problem = problem_of(collector)
    assert problem.kind == kind
    assert words in problem.text


def test_a_header_with_a_wrong_checksum_is_refused(writer: Writer, collector: StepsCollector) -> None:
    writer.write[30] ^= 1
    assert problem_of(collector).kind == "corrupt"


@pytest.mark.parametrize(
    "said",
    [
        {"rank": -1, "world_size": True, "pipeline": 1e9, "torch_version": 2, "device_name": "\x1b\n"},
        {"model_flops_per_step": float("nan"), "peak_flops_per_second": float("inf"), "data": "1"},
        {"model_flops_per_step": -3, "peak_flops_per_second": int("9" * 2000)},
        {"rank": [1], "tensor": {"a": 1}, "unknown": "x"},
    ],
)
def test_facts_of_the_wrong_kind_are_left_out(
    said: dict[str, object], writer: Writer, collector: StepsCollector
) -> None:
    writer.rewrite_facts(json.dumps(said).encode())
    assert sample_of(collector).facts == ProbeFacts()


@pytest.mark.parametrize("text", [b"[" * 3000, b"[1]", b"{", b"\xff\xfe{}", b'{"rank": ' + b"9" * 3500 + b"}x"])
def test_facts_that_are_no_object_are_refused(text: bytes, writer: Writer, collector: StepsCollector) -> None:
    writer.rewrite_facts(text)
    assert problem_of(collector).kind == "corrupt"


def test_facts_that_claim_a_megabyte_are_refused(writer: Writer, collector: StepsCollector) -> None:
    writer.rewrite_facts(b"{}", length=1 << 20)
    assert problem_of(collector).kind == "corrupt"


def test_the_clock_that_a_ring_claims_is_not_used(writer: Writer, collector: StepsCollector) -> None:
    writer.step()
    body = struct.pack("<8q", 2**62, -(2**62), *(-1,) * 6)
    writer.write[ring_layout.LIVE_OFFSET : ring_layout.LIVE_OFFSET + 68] = body + ring_layout.CHECKSUM.pack(
        zlib.crc32(body)
    )
    ended = sample_of(collector).last_step_unix_nanos
    assert ended is not None
    assert abs(ended - (time.time_ns() - time.monotonic_ns() + writer.end_ns)) < 50 * MS


@contextlib.contextmanager
def memfd(size: int, *, seals: int = 0) -> Iterator[int]:
    fd = os.memfd_create(ring_layout.RING_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, ring_layout.F_ADD_SEALS, seals)
        yield fd
    finally:
        os.close(fd)


def test_an_unsealed_file_is_not_read(collector: StepsCollector) -> None:
    with memfd(ring_layout.RING_BYTES):
        assert problem_of(collector).kind == "unsealed"


@pytest.mark.parametrize("size", [0, 100, ring_layout.RING_BYTES - 1, 1 << 40])
def test_a_file_of_the_wrong_size_is_refused(size: int, collector: StepsCollector) -> None:
    with memfd(size, seals=ring_layout.F_SEAL_SHRINK | ring_layout.F_SEAL_GROW):
        assert problem_of(collector).kind == "corrupt"


@pytest.mark.parametrize("size", [0, 4, ring_layout.RING_BYTES])
def test_a_file_without_a_header_makes_no_rank(size: int) -> None:
    with memfd(size):
        assert ring_reader.find_ring(RingSearch(f"/proc/{os.getpid()}")) is None


def test_unreadable_facts_leave_a_ring_without_a_group(writer: Writer) -> None:
    search = RingSearch(f"/proc/{os.getpid()}")
    writer.rewrite_facts(json.dumps({"rank": 1, "world_size": 2, "store": "\x1b[31m" + "x" * 2000}).encode())
    ring = ring_reader.find_ring(search)
    assert ring is not None and ring.facts.store is not None
    assert ring.facts.store.isprintable() and len(ring.facts.store) <= 1024
    writer.rewrite_facts(b"[" * 1000)
    ring = ring_reader.find_ring(search)
    assert ring is not None and ring.facts == ProbeFacts()


def test_a_disk_file_with_the_rings_name_is_not_opened(collector: StepsCollector) -> None:
    name = Path(f"/memfd:{ring_layout.RING_NAME}")  # its link in /proc reads exactly like a memfd's
    if not os.access("/", os.W_OK):
        name = Path("/dev/null")  # only root can plant it; the collector must stay quiet then too
    fd = os.open(name, os.O_CREAT | os.O_RDWR)
    try:
        found = collector.collect([ME], window())
        planted = name.name.startswith("memfd:")
        assert [type(value) for value in found.values()] == ([Problem] if planted else [])
        assert all("not a memfd" in value.text for value in found.values() if isinstance(value, Problem))
    finally:
        os.close(fd)
        if name.name.startswith("memfd:"):
            name.unlink()


def test_a_process_that_dies_while_being_read_disturbs_nobody(writer: Writer, collector: StepsCollector) -> None:
    writer.step()
    dying = subprocess.Popen(
        [sys.executable, "-c", "import sys; from rankscope.probe.ring import Ring; r = Ring(); print(1, flush=True);"
         "i = 0\nwhile True: i += 1; r.append(i, 1, (0,) * 12, 0, 1)"],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert dying.stdout is not None
    dying.stdout.readline()
    other = RankProcess("j", 0, 0, 2, dying.pid, 1, (dying.pid,))
    for round_ in range(50):
        if round_ == 25:
            dying.kill()
        found = collector.collect([other, ME], window())
        assert isinstance(found[ME.key], StepSample)
    dying.wait()
    dying.stdout.close()
    assert list(collector.collect([other, ME], window())) == [ME.key]


def test_a_writer_at_full_speed_never_yields_a_torn_record(collector: StepsCollector) -> None:
    code = (
        "import time; from rankscope.probe.ring import Ring; from rankscope.probe.ring_layout import SECONDS\n"
        "r = Ring(); print(1, flush=True)\n"
        "i, t = 0, time.monotonic_ns()\n"
        "while True: i += 1; s = (i % 1000 + 1) * 1000; r.append(t, s, dict.fromkeys(SECONDS, s * 1e-9), 0, 1)"
    )
    running = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert running.stdout is not None
    running.stdout.readline()
    rank = RankProcess("j", 0, 0, 1, running.pid, 1, (running.pid,))
    seen = 0
    try:
        while seen < 30_000:
            sample = sample_of(collector, rank)
            seen += len(sample.step_seconds)
            assert sample.input_seconds == pytest.approx(sample.step_seconds, rel=1e-6)
    finally:
        running.kill()
        running.wait()
        running.stdout.close()


def test_descriptors_that_may_not_be_read_are_a_permission_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: str) -> str:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "readlink", denied)
    problem = problem_of(StepsCollector())
    assert problem.kind == "permission"
    assert "CAP_SYS_PTRACE" in problem.text


def test_records_that_claim_the_most_steps_use_bounded_memory(writer: Writer, collector: StepsCollector) -> None:
    for _ in range(ring_layout.CAPACITY):
        writer.step(0.001, steps=ring_layout.MAX_STEPS)
    sample = sample_of(collector)
    assert 0 < len(sample.step_seconds) <= step_columns.MAX_ROWS
    assert sample.steps_total == ring_layout.CAPACITY * ring_layout.MAX_STEPS


def test_a_signalling_nan_is_not_measured_and_complains_nowhere(writer: Writer, collector: StepsCollector) -> None:
    writer.step(10)
    before = 32  # bytes before the first of the seconds
    offset = ring_layout.HEADER_BYTES + before
    writer.write[offset : offset + 4] = b"\x01\x00\x80\x7f"
    body = writer.write[ring_layout.HEADER_BYTES : ring_layout.HEADER_BYTES + ring_layout.RECORD.size]
    end = ring_layout.HEADER_BYTES + ring_layout.RECORD.size
    writer.write[end : end + ring_layout.CHECKSUM.size] = ring_layout.CHECKSUM.pack(zlib.crc32(body))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sample = sample_of(collector)
    assert np.isnan(sample.input_seconds).all() and len(sample.input_seconds) == 1
