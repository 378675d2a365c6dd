"""The NCCL plugin, called by a small program as NCCL calls it, and its memory as the daemon reads it."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from rankscope.daemon.samples import RankProcess, Span, StepSample
from rankscope.daemon.steps import unmarked_steps
from rankscope.daemon.steps.collector import StepsCollector
from rankscope.daemon.steps.nccl_reader import NcclMemory, Table, communicators, read_memory, read_records
from rankscope.probe import nccl_layout
from rankscope.probe.nccl_plugin import NcclPlugin, library

SOURCE = Path(__file__).parent / "nccl_stand_in.c"
VERSIONS = (4, 5, 6)
# As the stand-in has them.
BYTES, NANOSECONDS = 2000, 700


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("nccl") / "stand_in"
    subprocess.run(["cc", "-std=c11", "-O1", "-o", str(made), str(SOURCE), "-ldl", "-lpthread"], check=True)
    return made


@dataclass(frozen=True)
class Played:
    memory: NcclMemory
    table: Table
    overwritten: int


class Player:
    """Runs the stand-in with memory of its own."""

    def __init__(self, program: Path) -> None:
        self._program = program
        self.plugin = NcclPlugin()
        self.descriptor = self.plugin._make_memory()
        self.plugin.descriptor = self.descriptor

    def play(self, version: int, communicators: int, operations: int, case: str = "plain", **variables: str) -> Played:
        words = [self._program, library(), version, communicators, operations, case]
        subprocess.run(
            [str(word) for word in words],
            env={**os.environ, nccl_layout.VARIABLE: self.plugin.variable} | variables,
            pass_fds=[self.descriptor],
            # The memory is for the process that made it.
            preexec_fn=lambda: os.pwrite(self.descriptor, nccl_layout.fixed_part(os.getpid()), 0),
            check=True,
            timeout=120,
        )
        memory = read_memory(self.descriptor)
        records = read_records(self.descriptor, 0, memory.written)
        return Played(memory, records.table, records.overwritten)

    @contextmanager
    def loop(self, operations: int) -> Iterator[int]:
        """The process' id, while it runs."""
        words = [self._program, library(), 5, 1, operations, "loop"]
        with subprocess.Popen(
            [str(word) for word in words],
            env={**os.environ, nccl_layout.VARIABLE: self.plugin.variable},
            pass_fds=[self.descriptor],
            preexec_fn=lambda: os.pwrite(self.descriptor, nccl_layout.fixed_part(os.getpid()), 0),
            stdin=subprocess.PIPE,
        ) as process:
            yield process.pid


@pytest.fixture
def player(program: Path) -> Iterator[Player]:
    made = Player(program)
    yield made
    os.close(made.descriptor)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_operation_of_every_interface_arrives(player: Player, version: int) -> None:
    played = player.play(version, 4, 1000)
    memory, table = played.memory, played.table
    assert (memory.interface, memory.written, memory.lost) == (version, 4000, 0)
    assert len(table) == 4000
    assert set(table["bytes"].tolist()) == {BYTES}
    assert set((table["stop_ns"] - table["start_ns"]).tolist()) == {NANOSECONDS}
    assert (table["seen_ns"] >= table["issued_ns"]).all()
    names = nccl_layout.FUNCTIONS, nccl_layout.ALGORITHMS, nccl_layout.PROTOCOLS
    found = (
        names[0][table["function"][0] - 1],
        names[1][table["algorithm"][0] - 1],
        names[2][table["protocol"][0] - 1],
    )
    assert found == ("AllReduce", "RING", "SIMPLE")
    for communicator in np.unique(table["communicator"]):
        assert table["sequence"][table["communicator"] == communicator].tolist() == list(range(1000))
    assert sorted(memory.communicators["finished"].tolist()) == [1000] * 4
    assert set(memory.communicators["last_finished"].tolist()) == {999 << 8 | 1}
    assert set(zip(memory.communicators["ranks"].tolist(), memory.communicators["rank"].tolist(), strict=True)) == {
        (4, 2)
    }


def test_a_full_ring_keeps_the_newest_and_counts_the_rest(player: Player) -> None:
    threads, operations = 8, 20_000
    played = player.play(5, threads, operations)
    written, lost = played.memory.written, played.memory.lost
    # A thread that lost its CPU for thousands of operations of the others loses its own, and its record may come late.
    assert threads * operations - lost <= written <= threads * operations
    assert nccl_layout.CAPACITY - threads <= len(played.table) <= nccl_layout.CAPACITY
    assert played.overwritten == written - nccl_layout.CAPACITY


def test_each_replay_of_a_graph_is_recorded(player: Player) -> None:
    # The captured operation stays known while many others come and go.
    played = player.play(4, 1, 40_000, "graph")
    assert (played.memory.written, played.memory.lost) == (80_000, 0)


def test_an_operation_that_does_not_end_is_seen_as_busy(player: Player) -> None:
    rows = communicators(player.play(5, 2, 10, "stuck").memory)
    assert [(row.issued, row.started, row.finished, row.is_busy) for row in rows] == [(10, 10, 9, True)] * 2
    assert {(row.last_started, row.last_finished) for row in rows} == {(("AllReduce", 9), ("AllReduce", 8))}


def test_a_forked_process_records_nothing(player: Player) -> None:
    assert player.play(5, 4, 1000, "fork").memory.written == 4000


def test_a_library_that_is_unloaded_and_loaded_records_again(player: Player) -> None:
    played = player.play(5, 4, 1000, "again")
    assert played.memory.written == 3 * 4000
    assert len(played.memory.communicators) == 0  # all are destroyed


def test_communicators_beyond_the_table_are_left_out(player: Player) -> None:
    assert player.play(5, 100, 100, "many").memory.written == nccl_layout.COMMUNICATORS * 100


@pytest.mark.parametrize("variable", ["", "x", "99:1:2", "0:0:0", "1:2", "99999999999999999999:1:1"])
def test_without_its_memory_the_plugin_does_no_harm(player: Player, variable: str) -> None:
    assert player.play(5, 4, 100, **{nccl_layout.VARIABLE: variable}).memory.written == 0


def test_memory_of_another_process_is_not_touched(player: Player) -> None:
    own = player.play(5, 1, 10)
    words = [player._program, library(), 5, 1, 10, "plain"]
    environment = {**os.environ, nccl_layout.VARIABLE: player.plugin.variable}
    subprocess.run(
        [str(word) for word in words], env=environment, pass_fds=[player.descriptor], check=True, timeout=120
    )
    assert read_memory(player.descriptor).written == own.memory.written == 10


def test_a_loop_without_steps_has_those_of_its_operations(player: Player, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without a ring of the probe: its memory is found by its name."""
    monkeypatch.setattr(unmarked_steps, "MIN_SECONDS", 0.5)
    with player.loop(operations=50) as pid:
        rank = RankProcess("loop", 2, 0, 4, pid, 1, (pid,))
        collector, sample = StepsCollector(), None
        give_up_at = time.monotonic() + 120
        while sample is None and time.monotonic() < give_up_at:
            now = time.time_ns()
            sample = collector.collect([rank], Span(now - 2_000_000_000, now)).get(rank.key)
            time.sleep(0.3)
        assert isinstance(sample, StepSample)
        assert len(sample.step_seconds) > 0 and sample.steps_total >= len(sample.step_seconds)
        assert {(rate.function, rate.bytes_per_step) for rate in sample.collectives} == {("all_reduce", 50 * BYTES)}
