"""`rankscope run --capture-when-slow`: one capture of the slow rank and a peer, as soon as an alarm stands.

The capture runs in a thread of its own: neither the command nor the correlation waits for it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import grpc

from rankscope.analysis.verdicts.verdict import Kind, headline
from rankscope.cli.capture_download import fetch, prepare
from rankscope.cli.capture_output import LineProgress, follow
from rankscope.cli.connection import explain
from rankscope.cli.messages import CommandError
from rankscope.common.rank_selection import STRAGGLER_AND_PEER
from rankscope.operator.console.capture_answers import delivered, findings, outcome
from rankscope.operator.correlation.correlator import JobState
from rankscope.v1 import capture_service_pb2 as pb
from rankscope.v1.capture_service_pb2_grpc import CaptureServiceStub

MAX_BYTES = 1 << 30
# After the end of the command: its ranks are gone, and only what was recorded is still fetched.
MAX_END_SECONDS = 10.0
log = logging.getLogger(__name__)


def default_folder() -> Path:
    return Path(f"rankscope-capture-{time.strftime('%Y%m%d-%H%M%S')}")


class SlowCapture:
    """A listener of the correlator. Use it as a context, within that of the server at `target`; `line` then says where
    the recording is, and what it says."""

    def __init__(self, target: Callable[[], str], folder: Path) -> None:
        """Raises CommandError if the folder cannot be written to."""
        prepare(folder)
        self._target = target
        self._folder = folder
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_over = False
        self.line = "no rank was slow for long enough to be captured"

    def __call__(self, states: tuple[JobState, ...]) -> None:
        slow = next((state for state in states if self._is_slow(state)), None)
        with self._lock:
            if slow is None or self._thread is not None or self._is_over:
                return
            self._thread = threading.Thread(target=self._capture, args=(slow,), name="rankscope-slow", daemon=True)
            self._thread.start()

    def __enter__(self) -> SlowCapture:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self._is_over = True
        if self._thread is not None:
            self._thread.join(MAX_END_SECONDS)
            if self._thread.is_alive():
                self.line = "the command ended before the capture of the slow rank did"
        with contextlib.suppress(OSError):
            self._folder.rmdir()  # where nothing was captured

    @staticmethod
    def _is_slow(state: JobState) -> bool:
        return state.verdict.is_alarm and state.verdict.kind is Kind.SLOW_RANK and bool(state.verdict.culprits)

    def _capture(self, state: JobState) -> None:
        target = self._target()
        request = pb.StartCaptureRequest(job=state.job, ranks=STRAGGLER_AND_PEER, reason=headline(state.verdict))
        capture: pb.Capture | None = None
        try:
            with grpc.insecure_channel(target) as channel:
                stub = CaptureServiceStub(channel)
                for change in follow(stub, request, log.info):
                    capture = change
                assert capture is not None  # follow() ends with a final capture or raises
                here = delivered(capture)
                fetched = fetch(stub, target, capture, here, self._folder, LineProgress(), MAX_BYTES)
        except grpc.RpcError as error:
            self.line = f"the slow rank was not captured: {explain(target, error)}"
        except CommandError as error:
            self.line = f"the slow rank was not captured: {error}"
        except Exception:
            # The command and its card must not suffer.
            log.exception("capture of the slow rank")
            self.line = "the slow rank was not captured: unexpected error; please report this"
        else:
            errors = [entry.error for entry in capture.ranks if entry.error] + list(fetched.errors.values())
            said = findings(capture)[1:2] or errors[:1] or [outcome(capture)]
            self.line = f"{self._folder}: {said[0]}"
