"""`rankscope record` against real memories of this process, served over real gRPC, or against what a server claims."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest

from rankscope.analysis.step_graph.recording import read_recording
from rankscope.cli import record
from rankscope.daemon.recordings.service import RecordingServicer
from rankscope.v1 import job_service_pb2, job_service_pb2_grpc, window_pb2
from rankscope.v1 import recording_service_pb2 as pb
from rankscope.v1.recording_service_pb2_grpc import (
    RecordingServiceServicer,
    add_RecordingServiceServicer_to_server,
)
from tests.support.commands import Command
from tests.unit.daemon.nccl_writer import NcclWriter
from tests.unit.daemon.ring_writer import ME, MS, Writer

Answers = Callable[[pb.RecordRunRequest, grpc.ServicerContext], Iterator[pb.RecordRunResponse]]


class Jobs(job_service_pb2_grpc.JobServiceServicer):
    def ListJobs(self, request: object, context: object) -> job_service_pb2.ListJobsResponse:
        frames = [window_pb2.FrameShare(function="secret", file="/home/ada/model.py", line=1)]
        verdict = job_service_pb2.Verdict(
            kind=job_service_pb2.VERDICT_KIND_SLOW_RANK,
            confidence=job_service_pb2.CONFIDENCE_HIGH,
            culprits=[3],
            cause=job_service_pb2.Cause(phase="forward", frames=frames),
        )
        return job_service_pb2.ListJobsResponse(jobs=[job_service_pb2.JobStatus(job=ME.job, verdict=verdict)])


class Claims(RecordingServiceServicer):
    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def RecordRun(self, request: pb.RecordRunRequest, context: grpc.ServicerContext) -> Iterator[pb.RecordRunResponse]:
        yield from self._answers(request, context)


Serve = Callable[[RecordingServiceServicer], Command]


@pytest.fixture
def serve(capsys: pytest.CaptureFixture[str]) -> Iterator[Serve]:
    server = grpc.server(ThreadPoolExecutor(4))
    port = server.add_insecure_port("127.0.0.1:0")

    def start(servicer: RecordingServiceServicer) -> Command:
        add_RecordingServiceServicer_to_server(servicer, server)
        job_service_pb2_grpc.add_JobServiceServicer_to_server(Jobs(), server)
        server.start()
        return Command(capsys, "record", "--connect", f"127.0.0.1:{port}", "--seconds", "0.1")

    yield start
    server.stop(None).wait()


@pytest.fixture
def writer() -> Iterator[Writer]:
    made = Writer()
    yield made
    made.ring.abandon()


def own_ranks() -> RecordingServicer:
    return RecordingServicer("node-a", lambda: [ME], Path("/proc"))


def npy(table: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, table, allow_pickle=False)
    return file.getvalue()


def test_a_recording_is_written_and_can_be_read(writer: Writer, serve: Serve, tmp_path: Path) -> None:
    nccl, path = NcclWriter(), tmp_path / "job.npz"
    writer.ring.write_facts({"nccl_descriptor": nccl.descriptor})
    for _ in range(3):
        writer.step(50)
        nccl.collective(writer.end_ns - 5 * MS, 8)
    said = serve(own_ranks())("-o", path)
    os.close(nccl.descriptor)
    assert said.status == 0 and "1 rank, 3 operations, 3 steps; next: rankscope analyze recording" in said.out
    assert "warning: 3 steps are few" in said.err
    recording = read_recording(path)
    assert len(recording.operations) == 3 and recording.live_verdict == "rank 3 is slow"
    with zipfile.ZipFile(path) as archive:
        content = b"".join(map(archive.read, archive.namelist()))
    for name in ("secret", "model.py", "ada", "node-a"):
        assert name.encode() not in content and name.encode("utf-32-le") not in content
    assert "rank 3".encode("utf-32-le") in content, "texts are searched in the right encoding"


def test_a_run_without_operations_writes_no_file(writer: Writer, serve: Serve, tmp_path: Path) -> None:
    writer.step(50)
    error = serve(own_ranks()).complaint("-o", tmp_path / "job.npz", status=1)
    assert "rank 3: NCCL has not loaded the plugin" in error and not list(tmp_path.iterdir())


def test_an_unknown_run_is_refused_before_anything_is_written(serve: Serve, tmp_path: Path) -> None:
    command = serve(own_ranks())
    assert "no such rank of run 'other'" in command.complaint("-o", tmp_path / "job.npz", "--run", "other", status=6)
    assert "cannot be written" in command.complaint("-o", tmp_path / "no" / "job.npz")
    for seconds in ("nan", "0", "601", "ten"):
        said = command("-o", tmp_path / "job.npz", "--seconds", seconds)
        assert said.status == 2 and "is not a number above 0 and up to 600" in said.err
    assert not list(tmp_path.iterdir())


OPERATION = np.dtype([(name, "<i8") for name in ("start_ns", "stop_ns", "issued_ns", "bytes", "communicator")])


@pytest.mark.parametrize(
    "content",
    [
        b"no table",
        npy(np.zeros(3, dtype=OPERATION)),  # without some columns
        npy(np.zeros(3)),
        npy(np.zeros(3, dtype=OPERATION)).replace(b"(3,)", b"(9,)"),
        npy(np.zeros(3)).replace(b"'<f8'", b"'|O'  "),
    ],
)
def test_a_table_that_cannot_be_right_is_refused(serve: Serve, tmp_path: Path, content: bytes) -> None:
    answer = pb.RecordRunResponse(ranks=[pb.RankRecords(rank=0, operations=content)])
    error = serve(Claims(lambda *_: iter([answer]))).complaint("-o", tmp_path / "job.npz", status=1)
    assert "sent a table that cannot be read" in error and not list(tmp_path.iterdir())


def whole(rank: int, count: int) -> pb.RecordRunResponse:
    names = ("start_ns", "stop_ns", "issued_ns", "bytes", "communicator", "sequence", "peer", "function")
    operations = np.zeros(count, dtype=[(name, "<i8") for name in names])
    members = np.array([[7, 2, rank]], dtype=np.uint64)
    return pb.RecordRunResponse(
        ranks=[pb.RankRecords(rank=rank, operations=npy(operations), communicators=npy(members))]
    )


def test_a_server_that_goes_away_leaves_a_recording(serve: Serve, tmp_path: Path) -> None:
    def answers(_: pb.RecordRunRequest, context: grpc.ServicerContext) -> Iterator[pb.RecordRunResponse]:
        yield whole(0, 5)
        context.abort(grpc.StatusCode.UNAVAILABLE, "shutting down")

    said = serve(Claims(answers))("-o", tmp_path / "job.npz")
    assert said.status == 0 and "5 operations" in said.out and "warning: the recording ends after" in said.err


def test_problems_of_nodes_and_lost_operations_are_warnings(serve: Serve, tmp_path: Path) -> None:
    def answers(*_: object) -> Iterator[pb.RecordRunResponse]:
        yield pb.RecordRunResponse(problems=["node-b: no answer"])
        yield pb.RecordRunResponse(ranks=[pb.RankRecords(rank=number, problem="no probe") for number in (1, 2)])
        yield whole(0, 5)
        yield pb.RecordRunResponse(ranks=[pb.RankRecords(rank=0, overwritten=1234)])

    said = serve(Claims(answers))("-o", tmp_path / "job.npz")
    assert "warning: node-b: no answer\n" in said.err and "warning: ranks 1 and 2: no probe\n" in said.err
    assert "warning: 1,234 operations were overwritten before they could be read\n" in said.err


def test_a_recording_ends_at_a_size(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "MAX_BYTES", 1000)
    said = serve(Claims(lambda *_: iter([whole(0, 5), whole(0, 50), whole(0, 5)])))("-o", tmp_path / "job.npz")
    assert "55 operations" in said.out and "warning: the recording ends at" in said.err
