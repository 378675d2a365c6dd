"""From recordings to artifacts: processed in a separate process, stored within the quota, uploaded if configured."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from rankscope.common.object_store import shown
from rankscope.daemon.captures.orders import CancelledError, CaptureError, NoStepsError, Recording, Workspace
from rankscope.daemon.captures.probe_commands import window_file
from rankscope.daemon.captures.processing import messages as records
from rankscope.daemon.captures.processing.sandbox import MemoryShares, run_module
from rankscope.daemon.captures.processing.upload import (
    Order,
    Upload,
    Uploaded,
    answer_file,
    order_file,
    target_url,
)
from rankscope.daemon.captures.records import DUTY_CYCLE, Delivered, Recorded
from rankscope.daemon.captures.store import Store
from rankscope.daemon.samples import RankProcess
from rankscope.probe.declaration import PEAK_EXAMPLE, BadValueError, flops_from_environment, quantity
from rankscope.v1 import capture_service_pb2 as pb

log = logging.getLogger(__name__)

MAX_PROCESSING_SECONDS: Final = 600.0
MAX_UPLOADING_SECONDS: Final = 600.0
_NOTES_VERSION: Final = 1


class LocalArchive:
    """The runner's archive: a store on this node, and an upload URL if configured. All methods may raise
    CaptureError."""

    def __init__(self, store: Store, node: str, upload_url: str = "", proc_root: Path = Path("/proc")) -> None:
        self._store = store
        self._node = node
        self._upload_url = upload_url
        self._boot_id = _boot_id(proc_root)
        self._lock = threading.Lock()
        self._joins: dict[str, pb.JoinSummary] = {}
        self._memory = MemoryShares()

    def assign(self, capture_id: str, tenant: str) -> None:
        self._store.assign(capture_id, tenant)

    def tenant(self, capture_id: str) -> str:
        return self._store.tenant(capture_id)

    def workspace(self, capture_id: str) -> Workspace:
        return self._store.workspace(capture_id)

    def deliver(
        self,
        capture: pb.Capture,
        recorded: Recorded,
        steps: int | None,
        step_seconds: Mapping[int, float | None],
        cancelled: threading.Event,
    ) -> Iterator[tuple[int, Delivered | CaptureError]]:
        """All ranks at once: their traces are cut at the same step. `step_seconds` by rank, before the capture."""
        self._forget(capture.id)
        try:
            folder = self._store.workspace(capture.id).folder
            jobs = {rank: self._job(capture, folder, *pair, step_seconds.get(rank)) for rank, pair in recorded.items()}
            job = records.Job(steps, list(jobs.values()))
            crash = self._process(folder, job, self._store.tenant(capture.id), cancelled)
        except (CaptureError, OSError) as error:
            for rank in recorded:
                yield rank, CaptureError(f"rank {rank}: its recording cannot be worked on: {error}")
            return
        finally:
            # A second recording of the same rank replaces the first.
            for _, recording in recorded.values():
                for path in (recording.path, *recording.more_windows):
                    path.unlink(missing_ok=True)
            self._store.release(capture.id)
        self._remember_join(capture.id, folder)
        kept: dict[int, Delivered] = {}
        for rank, (process, _) in recorded.items():
            try:
                keeps = capture.requested_by != DUTY_CYCLE
                kept[rank] = self._keep(capture.id, folder, jobs[rank], process, crash, keeps_artifact=keeps)
            except CaptureError as error:
                yield rank, error
        yield from self._upload(capture, folder, kept, cancelled).items()

    def join(self, capture: pb.Capture) -> pb.JoinSummary | None:
        with self._lock:
            return self._joins.get(capture.id)

    def clean(self, capture_id: str) -> None:
        self._forget(capture_id)
        self._store.clean(capture_id)

    def save(self, capture: pb.Capture) -> None:
        self._store.save(capture)

    def load(self) -> Sequence[pb.Capture]:
        return self._store.load()

    def _job(
        self,
        capture: pb.Capture,
        folder: Path,
        process: RankProcess,
        recording: Recording,
        step_seconds: float | None,
    ) -> records.RankJob:
        flops, peak = _declared(process.environment)
        backend = next((entry.backend for entry in capture.ranks if entry.rank == process.rank), "")
        return records.RankJob(
            rank=process.rank,
            world_size=process.world_size,
            pid=process.namespace_pids[-1],
            recording=str(recording.path),
            artifact=str(folder / _artifact(process.rank, recording)),
            is_trace=recording.is_trace,
            notes=self._notes(capture, process, backend),
            steps=recording.steps,
            more_windows=[str(path) for path in recording.more_windows],
            flops_per_step=None if flops is None else flops / process.world_size,
            peak_flops_per_second=peak,
            step_seconds=step_seconds,
        )

    def _notes(self, capture: pb.Capture, process: RankProcess, backend: str) -> dict[str, Any]:
        """What an artifact says about itself, wherever it is copied."""
        return {
            "version": _NOTES_VERSION,
            "capture": capture.id,
            "job": process.job,
            "rank": process.rank,
            "local_rank": process.local_rank,
            "world_size": process.world_size,
            "node": self._node,
            "pod": process.pod,
            "namespace": process.namespace,
            "pid": process.pid,
            "container_pid": process.namespace_pids[-1],
            "backend": backend,
            # Artifacts of one boot share one clock; others are aligned by their collectives.
            "clock": {"name": "CLOCK_REALTIME", "boot_id": self._boot_id, "unix_seconds": time.time()},
        }

    def _process(self, folder: Path, job: records.Job, tenant: str, cancelled: threading.Event) -> CaptureError | None:
        """What ended it early, if anything: answers written until then count."""
        for one in job.ranks:
            records.result_file(folder, one.rank).unlink(missing_ok=True)
        records.join_file(folder).unlink(missing_ok=True)
        records.leave(records.job_file(folder), job)
        try:
            with self._memory.share(tenant, MAX_PROCESSING_SECONDS, cancelled) as memory_bytes:
                run_module(
                    "rankscope.daemon.captures.processing.worker",
                    folder,
                    seconds=MAX_PROCESSING_SECONDS,
                    what="working on the traces",
                    cancelled=cancelled,
                    memory_bytes=memory_bytes,
                )
        except CaptureError as error:
            return error
        return None

    def _keep(
        self,
        capture_id: str,
        folder: Path,
        job: records.RankJob,
        process: RankProcess,
        crash: CaptureError | None,
        *,
        keeps_artifact: bool = True,
    ) -> Delivered:
        """Without its artifact, which stays in the workspace, a recording takes no space from others."""
        who = str(process)
        result = records.find(records.result_file(folder, process.rank), records.RankResult)
        if result is None or result.rank != process.rank:
            kind = CancelledError if isinstance(crash, CancelledError) else CaptureError
            raise kind(f"{who}: {crash or 'its trace was left without an answer; please report this'}")
        if result.error:
            raise (NoStepsError if result.is_empty else CaptureError)(f"{who}: {result.error}")
        artifact = Path(job.artifact)
        try:
            size = self._store.keep(capture_id, artifact, artifact.name) if keeps_artifact else 0
            notes = artifact.with_name(f"{artifact.name}.notes")
            if notes.exists():
                self._store.keep(capture_id, notes, notes.name)
            more_windows = tuple(self._keep_window(capture_id, artifact, window) for window in result.more_windows)
            summary = None if result.summary is None else pb.TraceSummary(**msgspec.structs.asdict(result.summary))
        except OSError as error:
            raise CaptureError(f"{who}: its artifact cannot be kept: {error.strerror or error}") from error
        except (TypeError, ValueError) as error:
            raise CaptureError(f"{who}: its summary cannot be told ({error}); please report this") from error
        return Delivered(
            artifact=artifact.name if keeps_artifact else "",
            size_bytes=size,
            summary=summary,
            start_unix_millis=result.start_unix_millis,
            steps=result.steps,
            step_seconds=result.step_seconds,
            whole_steps=result.whole_steps,
            notes=tuple(result.notes),
            more_windows=more_windows,
        )

    def _keep_window(self, capture_id: str, first: Path, window: records.WindowResult) -> pb.CaptureWindow:
        path = window_file(first, window.number)
        return pb.CaptureWindow(
            artifact=path.name,
            bytes=self._store.keep(capture_id, path, path.name),
            start_unix_millis=window.start_unix_millis,
            steps=window.steps,
        )

    def _upload(
        self, capture: pb.Capture, folder: Path, kept: Mapping[int, Delivered], cancelled: threading.Event
    ) -> dict[int, Delivered]:
        """A failed upload is a note: the artifact is here."""
        if not self._upload_url or not kept:
            return dict(kept)
        uploads = []
        for rank, delivered in kept.items():
            if not delivered.artifact:
                continue
            more = (window.artifact for window in delivered.more_windows)
            for name in (delivered.artifact, f"{delivered.artifact}.notes", *more):
                path = self._store.folder / capture.id / name
                if path.exists():
                    uploads.append(Upload(rank, str(path), target_url(self._upload_url, capture.job, capture.id, name)))
        late = "not tried"
        try:
            for number in range(len(uploads)):
                answer_file(folder, number).unlink(missing_ok=True)
            records.leave(order_file(folder), Order(uploads))
            module = "rankscope.daemon.captures.processing.upload"
            run_module(module, folder, seconds=MAX_UPLOADING_SECONDS, what="uploading", cancelled=cancelled)
        except (CaptureError, OSError) as error:
            late = str(error)
        done = dict(kept)
        for number, one in enumerate(uploads):
            answer = records.find(answer_file(folder, number), Uploaded) or Uploaded(f"{shown(one.url)}: {late}")
            delivered = done[one.rank]
            if answer.error:
                note = f"not uploaded, kept on {self._node}: {answer.error}"
                done[one.rank] = replace(delivered, notes=(*delivered.notes, note))
            elif Path(one.path).name == delivered.artifact:
                done[one.rank] = replace(delivered, uri=shown(one.url))
            for window in delivered.more_windows:
                if not answer.error and Path(one.path).name == window.artifact:
                    window.uri = shown(one.url)
        return done

    def _remember_join(self, capture_id: str, folder: Path) -> None:
        joined = records.find(records.join_file(folder), records.Joined)
        if joined is None:
            return
        try:
            summary = pb.JoinSummary(**msgspec.to_builtins(joined))
        except (TypeError, ValueError) as error:
            log.warning("join of capture %s cannot be told: %s", capture_id, error)
            return
        with self._lock:
            self._joins[capture_id] = summary

    def _forget(self, capture_id: str) -> None:
        with self._lock:
            self._joins.pop(capture_id, None)


def _artifact(rank: int, recording: Recording) -> str:
    return f"rank{rank}.json.gz" if recording.is_trace else f"rank{rank}.folded.gz"


def _declared(environment: Mapping[str, str]) -> tuple[float | None, float | None]:
    """The job's FLOPs per step and the device's peak, if declared. The probe reports bad values."""
    flops = peak = None
    with contextlib.suppress(BadValueError):
        flops = flops_from_environment(environment)
    with contextlib.suppress(BadValueError):
        if "RANKSCOPE_PEAK_FLOPS" in environment:
            peak = quantity("RANKSCOPE_PEAK_FLOPS", environment["RANKSCOPE_PEAK_FLOPS"], PEAK_EXAMPLE)
    return flops, peak


def _boot_id(proc_root: Path) -> str | None:
    try:
        return (proc_root / "sys/kernel/random/boot_id").read_text().strip()[:64]
    except OSError:
        return None
