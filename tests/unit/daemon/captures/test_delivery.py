from __future__ import annotations

import errno
import gzip
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rankscope.daemon.captures.orders import CaptureError, NoStepsError, Recording
from rankscope.daemon.captures.processing import delivery
from rankscope.daemon.captures.processing.delivery import LocalArchive
from rankscope.daemon.captures.processing.messages import RankResult, leave, result_file
from rankscope.daemon.captures.records import Delivered
from rankscope.daemon.captures.store import Quota, Store
from rankscope.daemon.discovery.rank_environment import kept
from rankscope.daemon.samples import RankProcess
from rankscope.v1 import capture_service_pb2 as pb
from tests.unit.analysis.traces.step_files import StepFile

ID = "c-20261115-120000-abcdef"
JOB = "../../etc/passwd"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "captures", Quota(total_bytes=1 << 20))
    yield store
    store.close()


def _capture(ranks: int) -> pb.Capture:
    entries = [pb.RankCapture(rank=rank, backend="kineto") for rank in range(ranks)]
    return pb.Capture(id=ID, job=JOB, state=pb.CAPTURE_STATE_WRITTEN, ranks=entries)


def _process(rank: int, ranks: int, environment: dict[str, str] | None = None) -> RankProcess:
    # As discovery keeps it.
    known = kept(environment or {})
    return RankProcess(JOB, rank, rank, ranks, 9000 + rank, 1, (9000 + rank, 7 + rank), known, "pod-1", "ml")


def _deliver(
    archive: LocalArchive, recordings: list[bytes], steps: int | None, environment: dict[str, str] | None = None
) -> dict[int, Delivered | CaptureError]:
    recorded = {}
    for rank, data in enumerate(recordings):
        path = archive.workspace(ID).folder / f"rank{rank}.json"
        with path.open("xb") as file:
            file.write(data)
        recorded[rank] = (_process(rank, len(recordings), environment), Recording(path, is_trace=True))
    return dict(archive.deliver(_capture(len(recordings)), recorded, steps, {}, threading.Event()))


def _artifact(store: Store, rank: int) -> dict[str, Any]:
    file, _ = store.open(ID, rank)
    with file:
        read: dict[str, Any] = json.loads(gzip.decompress(file.read()))
        return read


def test_traces_become_artifacts_with_their_origin_and_a_summary(store: Store) -> None:
    archive = LocalArchive(store, "node-7")
    environment = {"RANKSCOPE_FLOPS_PER_STEP": "4T", "RANKSCOPE_PEAK_FLOPS": "100T"}
    delivered = _deliver(archive, [StepFile(pid=7).text(), StepFile(pid=8).text()], 2, environment)
    for rank, one in delivered.items():
        assert isinstance(one, Delivered) and one.summary is not None
        assert (one.artifact, one.steps, one.whole_steps, one.uri, one.notes) == (f"rank{rank}.json.gz", 2, 6, "", ())
        # Half of the job's FLOPs on each of two ranks.
        assert one.summary.mfu_ratio == pytest.approx(2e12 / (0.1 * 100e12))
        notes = _artifact(store, rank)["rankscope"]
        assert notes.items() >= {
            "capture": ID, "job": JOB, "rank": rank, "world_size": 2, "node": "node-7", "pod": "pod-1",
            "namespace": "ml", "pid": 9000 + rank, "container_pid": 7 + rank, "backend": "kineto", "steps": 2,
            "start_unix_millis": one.start_unix_millis,
        }.items()  # fmt: skip
        assert notes["clock"]["name"] == "CLOCK_REALTIME" and notes["clock"]["boot_id"]
        assert store.open(ID, rank)[1] == one.size_bytes
    join = archive.join(_capture(2))
    assert join is not None and join.collectives_matched == 2 and set(join.last_arrivals) == {0, 1}
    archive.clean(ID)
    assert archive.join(_capture(2)) is None
    assert sorted(path.name for path in (store.folder / ID).iterdir()) == ["rank0.json.gz", "rank1.json.gz"]


def test_a_rank_with_another_ones_trace_fails_alone(store: Store) -> None:
    delivered = _deliver(LocalArchive(store, "n"), [StepFile(pid=7).text(), StepFile(pid=7).text()], 2)
    assert isinstance(delivered[0], Delivered)
    assert isinstance(delivered[1], CaptureError)
    assert str(delivered[1]).startswith("rank 1 (pid 9001): the file is a trace of process 7, not of 8")


def test_a_second_recording_takes_the_place_of_the_first(store: Store) -> None:
    archive = LocalArchive(store, "n")
    first = _deliver(archive, [StepFile(pid=7, end_ms=290.0).text()], 3)[0]
    assert isinstance(first, Delivered) and (first.whole_steps, first.step_seconds) == (1, pytest.approx(0.1))
    second = _deliver(archive, [StepFile(pid=7).text()], 3)[0]
    assert isinstance(second, Delivered) and (second.steps, second.notes) == (3, ())
    assert _artifact(store, 0)["rankscope"]["steps"] == 3


def test_what_was_done_before_the_process_died_counts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(module: str, folder: Path, *, what: str, **more: Any) -> None:
        (folder / "rank0.json.gz").write_bytes(gzip.compress(b"{}"))
        leave(result_file(folder, 0), RankResult(0, steps=2))
        result_file(folder, 1).write_bytes(b'{"rank": 1, "steps": "../')
        leave(result_file(folder, 3), RankResult(3, error="the trace is empty", is_empty=True))
        raise CaptureError(f"{what} failed (signal 11): no message")

    monkeypatch.setattr(delivery, "run_module", die)
    delivered = _deliver(LocalArchive(store, "n"), [b"", b"", b"", b""], 2)
    assert isinstance(delivered[0], Delivered) and delivered[0].steps == 2
    assert isinstance(delivered[3], NoStepsError), "stacks are recorded instead"
    for rank in (1, 2):
        assert (
            str(delivered[rank]) == f"rank {rank} (pid 900{rank}): working on the traces failed (signal 11): no message"
        )


def test_reaching_the_quota_fails_the_rank_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "captures", Quota(total_bytes=40_000))
    run = delivery.run_module

    def run_beside_another_capture(*words: Any, **more: Any) -> None:
        run(*words, **more)
        (store.workspace(ID.replace("a", "b")).folder / "rank0.json").write_bytes(bytes(30_000))

    monkeypatch.setattr(delivery, "run_module", run_beside_another_capture)
    recordings = [StepFile(pid=7).text(), StepFile(pid=8).text(), StepFile(pid=9).text()]
    delivered = _deliver(LocalArchive(store, "n"), recordings, None)
    assert isinstance(delivered[0], Delivered)
    failed = [one for one in delivered.values() if isinstance(one, CaptureError)]
    assert failed and all("do not fit into the quota of 40000 bytes" in str(one) for one in failed)
    used = sum(path.stat().st_size for path in (store.folder / ID).iterdir() if path.is_file())
    assert 0 < used <= 8_000


def test_artifacts_are_uploaded_and_stay(store: Store, tmp_path: Path) -> None:
    archive = LocalArchive(store, "n", upload_url=f"file://{tmp_path}/bucket")
    (one,) = _deliver(archive, [StepFile(pid=7).text()], 2).values()
    assert isinstance(one, Delivered) and one.notes == ()
    assert one.uri.startswith(f"file://{tmp_path}/bucket/") and one.uri.endswith(f"/{ID}/rank0.json.gz")
    uploaded = Path(one.uri.removeprefix("file://"))
    assert uploaded.resolve().is_relative_to(tmp_path / "bucket")
    assert uploaded.stat().st_size == one.size_bytes == store.open(ID, 0)[1]


def test_a_failed_upload_is_noted_and_the_artifact_stays(store: Store, tmp_path: Path) -> None:
    (tmp_path / "bucket").write_bytes(b"not a folder")
    archive = LocalArchive(store, "node-7", upload_url=f"file://{tmp_path}/bucket")
    (one,) = _deliver(archive, [StepFile(pid=7).text()], 2).values()
    assert isinstance(one, Delivered) and one.uri == ""
    assert one.notes[0].startswith("not uploaded, kept on node-7: file://") and len(one.notes) == 1
    assert store.open(ID, 0)[1] == one.size_bytes


def test_stacks_are_kept_with_their_notes_beside(store: Store, tmp_path: Path) -> None:
    archive = LocalArchive(store, "n", upload_url=f"file://{tmp_path}/bucket")
    path = archive.workspace(ID).folder / "rank0.folded"
    path.write_bytes(b"main;train 7\n")
    recording = Recording(path, is_trace=False, start_unix_millis=5, notes=("from py-spy",))
    ((_, one),) = archive.deliver(_capture(1), {0: (_process(0, 1), recording)}, 2, {}, threading.Event())
    assert isinstance(one, Delivered)
    assert (one.artifact, one.summary, one.steps, one.start_unix_millis) == ("rank0.folded.gz", None, None, None)
    beside = json.loads((store.folder / ID / "rank0.folded.gz.notes").read_bytes())
    assert (beside["rank"], beside["node"]) == (0, "n")
    assert len(list((tmp_path / "bucket").rglob("rank0.folded.gz*"))) == 2


def test_a_disk_that_fills_up_fails_every_rank_in_words(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave_nothing(path: Path, answer: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(delivery.records, "leave", leave_nothing)
    delivered = _deliver(LocalArchive(store, "n"), [b"{}", b"{}"], 2)
    for rank, one in delivered.items():
        assert isinstance(one, CaptureError)
        assert str(one).startswith(f"rank {rank}: its recording cannot be worked on") and "No space left" in str(one)
    assert not list(store.workspace(ID).folder.glob("rank*.json"))
