"""Records of ranks as `rankscope record` gets them: read from real memories, and served over real gRPC."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from rankscope.daemon.recordings import service
from rankscope.daemon.recordings.rank_reader import NO_NCCL, NO_PROBE, RankReader
from rankscope.daemon.recordings.service import RecordingServicer
from rankscope.daemon.server import rank_requests
from rankscope.v1 import recording_service_pb2 as pb
from rankscope.v1.recording_service_pb2_grpc import RecordingServiceStub, add_RecordingServiceServicer_to_server
from tests.unit.daemon.nccl_writer import HASH, NcclWriter
from tests.unit.daemon.ring_writer import ME, MS, Writer

Code = grpc.StatusCode


@pytest.fixture
def nccl(writer: Writer) -> Iterator[NcclWriter]:
    made = NcclWriter()
    writer.ring.write_facts({"nccl_descriptor": made.descriptor})
    yield made
    os.close(made.descriptor)


@pytest.fixture
def reader() -> RankReader:
    return RankReader(f"/proc/{os.getpid()}", os.getpid())


def train(writer: Writer, nccl: NcclWriter, steps: int) -> None:
    for _ in range(steps):
        writer.step(50)
        nccl.collective(writer.end_ns - 5 * MS, 8)


def test_records_in_memory_come_first_and_new_ones_follow(writer: Writer, nccl: NcclWriter, reader: RankReader) -> None:
    train(writer, nccl, 3)
    first = reader.read()
    assert (first.steps["sequence"].tolist(), first.operations["number"].tolist()) == ([1, 2, 3], [1, 2, 3])
    assert first.communicators.tolist() == [[HASH, 4, 2]]
    assert reader.read().is_empty
    train(writer, nccl, 2)
    later = reader.read()
    assert (later.steps["sequence"].tolist(), later.operations["number"].tolist()) == ([4, 5], [4, 5])
    assert (later.overwritten, later.problem) == (0, "")


def test_operations_that_were_overwritten_are_counted(writer: Writer, nccl: NcclWriter, reader: RankReader) -> None:
    train(writer, nccl, 1)
    reader.read()
    nccl.skip(20_000)
    train(writer, nccl, 1)
    new = reader.read()
    assert new.overwritten == 20_001 - (1 << 14) and new.operations["number"].tolist() == [20_002]


def test_another_memory_of_the_process_is_read_anew(writer: Writer, nccl: NcclWriter, reader: RankReader) -> None:
    train(writer, nccl, 3)
    reader.read()
    after = NcclWriter()
    writer.ring.write_facts({"nccl_descriptor": after.descriptor})
    train(writer, after, 2)
    assert reader.read().operations["number"].tolist() == [1, 2]
    os.close(after.descriptor)


def test_a_rank_without_operations_has_a_reason(writer: Writer, nccl: NcclWriter, reader: RankReader) -> None:
    nccl.load(interface=0)
    writer.step(50)
    silent = reader.read()
    assert (silent.problem, len(silent.steps), len(silent.operations)) == (NO_NCCL, 1, 0)
    writer.ring.write_facts({"nccl_reason": "NCCL_PROFILER_PLUGIN is set"})
    assert reader.read().problem == "NCCL_PROFILER_PLUGIN is set"
    assert RankReader("/proc/1", 1).read().problem  # no probe, or no permission
    assert "belongs to pid" in RankReader(f"/proc/{os.getpid()}", os.getpid() + 1).read().problem


def test_a_rank_without_a_probe_says_what_to_do() -> None:
    assert RankReader(f"/proc/{os.getpid()}", os.getpid()).read().problem == NO_PROBE


class Served:
    def __init__(self) -> None:
        self.ranks = [ME]
        servicer = RecordingServicer("node-a", lambda: self.ranks, Path("/proc"))
        self.server = grpc.server(ThreadPoolExecutor(8))
        add_RecordingServiceServicer_to_server(servicer, self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()
        self.stub = RecordingServiceStub(grpc.insecure_channel(f"127.0.0.1:{port}"))

    def record(self, **request: Any) -> list[pb.RankRecords]:
        asked = pb.RecordRunRequest(**{"job": ME.job, "seconds": 0.1, **request})
        return [one for answer in self.stub.RecordRun(asked, timeout=60) for one in answer.ranks]

    def refusal(self, **request: Any) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.RpcError) as refused:
            self.record(**request)
        return refused.value.code(), refused.value.details()


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.server.stop(None).wait()


def test_the_records_of_a_run_are_served(writer: Writer, nccl: NcclWriter, served: Served) -> None:
    train(writer, nccl, 3)
    (records,) = served.record()
    assert (records.rank, records.node, records.problem) == (ME.rank, "node-a", "")
    operations = np.load(io.BytesIO(records.operations), allow_pickle=False)
    assert operations["communicator"].tolist() == [HASH & 0xFFFFFFFF] * 3
    assert np.load(io.BytesIO(records.steps), allow_pickle=False)["sequence"].tolist() == [1, 2, 3]


def test_a_recording_goes_on_until_the_run_ends(
    writer: Writer, nccl: NcclWriter, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "LOOK_SECONDS", 0.01)
    answers = served.stub.RecordRun(pb.RecordRunRequest(job=ME.job, seconds=500.0))
    train(writer, nccl, 1)
    next(answers)
    train(writer, nccl, 2)
    (records,) = next(answers).ranks
    assert len(np.load(io.BytesIO(records.operations), allow_pickle=False)) >= 1
    served.ranks = []
    list(answers)  # ends long before its time


def test_what_cannot_be_recorded_is_refused(writer: Writer, served: Served) -> None:
    for seconds in (0.0, -1.0, 601.0, float("nan")):
        code, text = served.refusal(seconds=seconds)
        assert code is Code.INVALID_ARGUMENT and "between 0 and 600 s" in text
    assert served.refusal(job="")[0] is Code.INVALID_ARGUMENT
    assert served.refusal(job="another")[0] is Code.NOT_FOUND
    assert served.refusal(ranks=[ME.rank + 1])[0] is Code.NOT_FOUND
    assert served.refusal(pods=["uid"])[0] is Code.NOT_FOUND


def test_few_recordings_are_made_at_once(
    writer: Writer, nccl: NcclWriter, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_requests, "QUEUE_SECONDS", 0.01)
    train(writer, nccl, 1)
    others = [served.stub.RecordRun(pb.RecordRunRequest(job=ME.job, seconds=600.0)) for _ in range(2)]
    for other in others:
        next(other)
    code, text = served.refusal()
    assert code is Code.RESOURCE_EXHAUSTED and "try again" in text
    for other in others:
        other.cancel()
