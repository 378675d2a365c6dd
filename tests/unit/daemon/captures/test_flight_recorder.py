"""Flight recorders of this process, which stands for a training process: from a ring that the test answers for, and
from files that it wrote, rightly and wrongly."""

from __future__ import annotations

import json
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from rankscope.analysis.collectives.flight_recorder.tail import MAX_TAIL_BYTES, match_tails
from rankscope.daemon.captures import flight_recorder
from rankscope.daemon.captures.flight_recorder import dump_paths, read_tails
from rankscope.daemon.procfs import read_stat
from rankscope.daemon.samples import RankProcess
from rankscope.probe import capture_commands, ring_layout
from rankscope.probe.capture_commands import Answer
from rankscope.probe.profiler import sealed
from rankscope.v1.profile_service_pb2 import FlightRecorderTail
from tests.support.waiting import wait_until
from tests.unit.analysis.collectives.flight_recorder.made_dumps import as_pickle, content, record
from tests.unit.daemon.ring_writer import ME, MS, Writer

WAITS = as_pickle(content([record(1), record(2, state="scheduled")], {"0": range(4)}))
ABSENT = as_pickle(content([record(1)], {"0": range(4)}))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine may be busy, or stand still for seconds."""
    monkeypatch.setattr(flight_recorder, "PARSE_SECONDS", 180.0)


@pytest.fixture
def writer() -> Iterator[Writer]:
    writer = Writer()
    writer.ring.write_abilities(ring_layout.TAKES_CAPTURES | ring_layout.HANDS_OVER_RECORDER)
    writer.end_ns -= 10 * 1000 * MS
    writer.step()
    yield writer
    writer.ring.abandon()


def rank(number: int, prefix: Path | str) -> RankProcess:
    ticks = read_stat("/proc/self").start_ticks
    return replace(ME, rank=number, start_ticks=ticks, environment={"TORCH_FR_DUMP_TEMP_FILE": str(prefix)})


def read(*ranks: RankProcess) -> list[FlightRecorderTail]:
    tails = read_tails(ranks)
    for tail in tails.values():
        assert bool(tail.records) != bool(tail.problem) and len(tail.records) <= MAX_TAIL_BYTES
        assert tail.problem.isprintable() and tail.source.isprintable()
        assert max(len(tail.problem), len(tail.source)) <= flight_recorder.TEXT_CHARACTERS
    return [tails[one.key] for one in ranks]


def sequences(tail: FlightRecorderTail) -> list[int]:
    return [one["collective_seq_id"] for one in json.loads(tail.records)["entries"]]


@contextmanager
def answering(writer: Writer, answer: Callable[[Answer], None]) -> Iterator[list[int]]:
    """Plays the probe's thread; yields the verbs of the commands that it has seen."""
    verbs: list[int] = []
    ended = threading.Event()

    def run() -> None:
        mark = bytes(4)
        while not ended.is_set():
            if (now := writer.ring.command_mark()) != mark:
                mark = now
                command = capture_commands.read_command(writer.ring, mark)
                assert command is not None
                verbs.append(command.verb)
                if command.verb == ring_layout.VERB_RECORDER:
                    answer(Answer(writer.ring, command.number))
            time.sleep(0.005)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flight_recorder, "ANSWER_SECONDS", 180.0)
            yield verbs
        wait_until(lambda: ring_layout.VERB_DROP in verbs)
    finally:
        ended.set()
        thread.join()


def test_the_recorder_is_read_from_the_probe_then_dropped(writer: Writer, tmp_path: Path) -> None:
    (tmp_path / "fr_3").write_bytes(ABSENT)
    fd = sealed(WAITS)
    with answering(writer, lambda answer: answer.report(ring_layout.PHASE_WRITTEN, fd=fd)) as verbs:
        (tail,) = read(rank(3, tmp_path / "fr_"))
    os.close(fd)
    assert (tail.source, sequences(tail)) == ("probe", [1, 2])
    assert verbs == [ring_layout.VERB_RECORDER, ring_layout.VERB_DROP]


def test_torchs_dump_file_is_read_when_the_probe_is_silent(
    writer: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_recorder, "ANSWER_SECONDS", 0.2)
    (tmp_path / "fr_3").write_bytes(WAITS)
    (tail,) = read(rank(3, tmp_path / "fr_"))
    assert (tail.source, sequences(tail)) == (str(tmp_path / "fr_3"), [1, 2])
    assert commanded(writer).verb == ring_layout.VERB_DROP


def commanded(writer: Writer) -> capture_commands.Command:
    command = capture_commands.read_command(writer.ring, writer.ring.command_mark())
    assert command is not None
    return command


def test_a_dump_file_older_than_the_last_step_is_ignored(writer: Writer, tmp_path: Path) -> None:
    (tmp_path / "fr_3").write_bytes(WAITS)
    before = time.time() - 60.0
    os.utime(tmp_path / "fr_3", (before, before))
    failed = "ValueError: it holds no collectives; set TORCH_FR_BUFFER_SIZE=2000 in the job"
    with answering(writer, lambda answer: answer.report(ring_layout.PHASE_FAILED, failed)):
        (tail,) = read(rank(3, tmp_path / "fr_"))
    assert failed in tail.problem
    assert "fr_3 is older than the last step of the process, so it is not of this hang; start the job" in tail.problem


def test_a_probe_without_a_recorder_is_not_waited_for(writer: Writer, tmp_path: Path) -> None:
    writer.ring.write_abilities(ring_layout.TAKES_CAPTURES)
    (tail,) = read(rank(3, tmp_path / "fr_"))
    assert "no flight recorder in the process; torch has written no dump to" in tail.problem
    assert "TORCH_FR_DUMP_TEMP_FILE=" in tail.problem
    assert writer.ring.command_mark() == bytes(4)


def test_a_probe_is_not_asked_while_steps_end(writer: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command for a capture may be waiting there."""
    monkeypatch.setattr(flight_recorder, "STALLED_SECONDS", 600.0)
    writer.end_ns = time.monotonic_ns()
    writer.step(0)
    (tail,) = read(rank(3, tmp_path / "fr_"))
    assert "rank 3" in tail.problem and "its steps end" in tail.problem
    assert writer.ring.command_mark() == bytes(4)


def test_what_a_hostile_probe_hands_over_is_refused(writer: Writer, tmp_path: Path) -> None:
    unsealed = os.memfd_create(ring_layout.TRACE_NAME)
    zeros, large = sealed(bytes(8192)), sealed(b"]" * (ring_layout.MAX_RECORDER_BYTES + 1))
    for fd, words in ((unsealed, "not sealed"), (zeros, "no text"), (large, "are allowed"), (1 << 29, "cannot be")):
        with answering(writer, partial(Answer.report, phase=ring_layout.PHASE_WRITTEN, fd=fd)):
            (tail,) = read(rank(3, tmp_path / "fr_"))
        assert words in tail.problem
    for fd in (unsealed, zeros, large):
        os.close(fd)


def test_a_hostile_dump_does_not_affect_other_ranks(tmp_path: Path) -> None:
    """Without a probe, so that all files are read."""

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return (os.mkdir, (str(tmp_path / "executed"),))

    most = ring_layout.MAX_RECORDER_BYTES
    contents = [WAITS, WAITS, ABSENT, pickle.dumps(Evil()), b"]" * (most // 4), b"(" * 4000, b'{"version":' * 1000]
    contents += [b"[" * (most - 1), b"", WAITS[:-40], b"]" * most + b"."]
    for number, dump in enumerate(contents):
        (tmp_path / f"fr_{number}").write_bytes(dump)
    secret = tmp_path / "secret"
    secret.write_bytes(WAITS)
    (tmp_path / "fr_11").symlink_to(secret)
    os.mkfifo(tmp_path / "fr_12")
    (tmp_path / "fr_13").hardlink_to(secret)
    with (tmp_path / "fr_14").open("wb") as file:
        file.truncate(1 << 40)
    (tmp_path / "fr_15").write_bytes(WAITS)
    os.utime(tmp_path / "fr_15", (1, 1))
    tails = read(*(rank(number, tmp_path / "fr_") for number in range(16)))
    assert [bool(tail.records) for tail in tails] == [True] * 3 + [False] * 13
    assert "the name of a function" in tails[3].problem and not (tmp_path / "executed").exists()
    assert "older than the start of the process" in tails[15].problem
    found = match_tails({number: tail.records for number, tail in enumerate(tails) if tail.records})
    assert found.culprits == (2,)


def test_a_path_that_is_not_absolute_is_not_guessed() -> None:
    (tail,) = read(rank(3, "fr_"))
    assert "torch writes its dump to fr_3, which is not absolute" in tail.problem


def test_ranks_beyond_the_limit_are_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "MAX_RANKS", 1)
    first, second = read(rank(0, tmp_path / "fr_"), rank(1, tmp_path / "fr_"))
    assert "no dump" in first.problem and "name fewer ranks" in second.problem
    assert read_tails([]) == {}


@pytest.mark.parametrize(
    ("environment", "paths"),
    [
        ({"TORCH_FR_DUMP_TEMP_FILE": "/s/fr_", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/s/old_"}, ["/s/fr_7"]),
        ({"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/s/old_", "HOME": "/home/ada"}, ["/s/old_7"]),
        (
            {"HOME": "/home/ada"},
            [
                "/home/ada/.cache/torch/comm_lib_trace_rank_7",
                "/home/ada/.cache/torch/nccl_trace_rank_7",
                "/tmp/nccl_trace_rank_7",
            ],
        ),
        (
            {"XDG_CACHE_HOME": "/cache"},
            [
                "/cache/torch/comm_lib_trace_rank_7",
                "/tmp/.cache/torch/comm_lib_trace_rank_7",
                "/cache/torch/nccl_trace_rank_7",
                "/tmp/.cache/torch/nccl_trace_rank_7",
                "/tmp/nccl_trace_rank_7",
            ],
        ),
    ],
)
def test_files_are_looked_for_where_torch_writes_them(environment: dict[str, str], paths: list[str]) -> None:
    assert list(dump_paths(environment, 7)) == paths
