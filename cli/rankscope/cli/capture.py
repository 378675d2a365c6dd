"""`rankscope capture`: a deep recording of chosen ranks, at the same time, without a change to their code."""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import grpc

from rankscope.cli import nsight, options
from rankscope.cli.capture_download import (
    DownloadError,
    Fetched,
    fetch,
    prepare,
    print_capture,
)
from rankscope.cli.capture_output import (
    LostError,
    Progress,
    elsewhere,
    follow,
    follow_again,
    is_complete,
    make_console,
    make_progress,
    to_object,
)
from rankscope.cli.connection import CALL_SECONDS, connected, explain
from rankscope.cli.contexts import add_connection_arguments
from rankscope.cli.messages import CommandError, Exit, to_stderr, to_stdout
from rankscope.operator.console.capture_answers import FINAL, delivered
from rankscope.v1 import capture_service_pb2 as pb
from rankscope.v1.capture_service_pb2_grpc import CaptureServiceStub

# How long a cancelled capture is followed, to report the state of its ranks.
CANCEL_SECONDS = 10.0
_MAX_STEPS = 1_000_000
_OPTIONS = ("shapes", "stacks", "memory", "flops", "modules", "allow_slowdown")
_EPILOG = """\
examples:
  rankscope capture --output traces/                       all ranks of the one job on this machine
  rankscope capture --run bert --ranks 0,4-7 --seconds 2   some ranks, by time
  rankscope capture --ranks straggler+peer                 the slow rank, and a healthy one to compare it with
  rankscope capture --run team/llama --steps 12 --context prod
                                                           a run of a cluster (rankscope context --help)
  rankscope capture --nsight --seconds 5 --output reports/ a job that was started by `nsys launch`

Without --steps and --seconds, as many steps are recorded as tell a slow rank from the others: 8 to 40, for about 10 s
at most. The result begins with the verdict on the job, and says whether the recording confirms it.

Jobs started with KINETO_USE_DAEMON=1 TEARDOWN_CUPTI=1 are recorded by torch's own profiler; docs/captures.md describes
what is done for the others. Ctrl-C cancels the capture. Exit code: 0 if every rank delivered, 1 if some did not;
2 usage, 4 no server, 5 refused, 6 no such run (docs/cli.md).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    options.add_options(parser, "--run", "--ranks straggler")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, metavar="N", help="how many training steps to record (default: enough)")
    length.add_argument("--seconds", type=float, metavar="SECONDS", help="how long to record")
    options.add_output_argument(parser, "DIR", "download the recordings into this directory")
    options.add_options(parser, "--max-bytes", "--json")
    parser.add_argument("--shapes", action="store_true", help="record the shapes of operators' inputs")
    parser.add_argument("--stacks", action="store_true", help="record Python stacks (costs most)")
    parser.add_argument("--memory", action="store_true", help="record allocations")
    parser.add_argument("--flops", action="store_true", help="record estimated FLOPs of operators")
    parser.add_argument("--modules", action="store_true", help="record which module calls an operator")
    parser.add_argument("--wait", type=int, default=0, metavar="N", help="let so many steps pass before each window")
    parser.add_argument("--warmup", type=int, metavar="N", help="steps to warm the profiler up (default: 1 on a GPU)")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="record so many windows (default: 1)")
    parser.add_argument(
        "--allow-slowdown",
        action="store_true",
        help="record CUDA processes started without TEARDOWN_CUPTI=1: they may stay up to 30 %% slower",
    )
    parser.add_argument(
        "--patience",
        type=float,
        metavar="SECONDS",
        help="wait this long for ranks that cannot be had at once (default: 60)",
    )
    parser.add_argument(
        "--nsight",
        action="store_true",
        help="record by nsys instead, for jobs of yours on this machine that were started by `nsys launch`",
    )
    parser.add_argument("--reason", default="", metavar="TEXT", help="kept with the capture")
    add_connection_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    request = _request(arguments)
    if arguments.nsight:
        _check_nsight(request)
    if arguments.output is not None:
        prepare(arguments.output)
    with connected(arguments) as (target, channel):
        if arguments.nsight:
            return nsight.record(channel, target, arguments)
        return _Asked(CaptureServiceStub(channel), target, arguments).run(request)


class _Asked:
    """One capture from the request to the result."""

    def __init__(self, stub: CaptureServiceStub, target: str, arguments: argparse.Namespace) -> None:
        self._stub = stub
        self._target = target
        self._json: bool = arguments.json
        self._output: Path | None = arguments.output
        self._max_bytes: int = arguments.max_bytes
        self._capture: pb.Capture | None = None

    def run(self, request: pb.StartCaptureRequest) -> int:
        fetched: Fetched | None = None
        try:
            with make_progress(make_console(stderr=True)) as progress:
                for capture in follow(self._stub, request, progress.say):
                    self._capture = capture
                    progress.show(capture)
                if self._output is not None:
                    fetched = self._fetch(self._output, progress)
        except KeyboardInterrupt:
            return self._interrupted()
        except (LostError, DownloadError):
            self._tell(None)
            raise
        self._tell(fetched)
        assert self._capture is not None  # follow() ends with a final capture or raises
        return Exit.OK if is_complete(self._capture) and not (fetched and fetched.errors) else Exit.FAILED

    def _fetch(self, output: Path, progress: Progress) -> Fetched:
        assert self._capture is not None  # follow() ended with a final capture
        return fetch(
            self._stub, self._target, self._capture, delivered(self._capture), output, progress, self._max_bytes
        )

    def _interrupted(self) -> int:
        capture = self._capture
        if capture is None:
            to_stderr("interrupted before the daemon answered; `rankscope captures ls` shows whether a capture began")
        elif capture.state in FINAL:
            where = self._output or "DIR"
            command = f"rankscope captures get {capture.id} --output {where}{elsewhere(capture.id)}"
            to_stderr(f"interrupted; `{command}` continues the download")
        else:
            self._cancel(capture.id)
        return Exit.INTERRUPTED

    def _cancel(self, capture_id: str) -> None:
        try:
            self._stub.CancelCapture(pb.CancelCaptureRequest(id=capture_id), timeout=CALL_SECONDS)
            to_stderr(f"interrupted; asked for capture {capture_id} to be cancelled. What was delivered by now is kept")
            deadline = time.monotonic() + CANCEL_SECONDS
            for capture in follow_again(self._stub, capture_id, lambda: time.monotonic() < deadline):
                self._capture = capture
        except grpc.RpcError as error:
            to_stderr(
                f"interrupted, and capture {capture_id} could not be cancelled: {explain(self._target, error)}; "
                f"next: rankscope captures cancel {capture_id}{elsewhere(capture_id)}"
            )
        except (LostError, KeyboardInterrupt):
            to_stderr(f"`rankscope captures show {capture_id}{elsewhere(capture_id)}` shows how it ended")
        self._tell(None)

    def _tell(self, fetched: Fetched | None) -> None:
        if self._capture is None:
            return
        if self._json:
            files, errors = (None, None) if fetched is None else (fetched.files, fetched.errors)
            to_stdout(json.dumps(to_object(self._capture, files, errors)))
        else:
            print_capture(self._capture, fetched)


def _request(arguments: argparse.Namespace) -> pb.StartCaptureRequest:
    options.selected_ranks(arguments, suspects=True)
    request = pb.StartCaptureRequest(
        job=arguments.run,
        ranks=arguments.ranks,
        reason=arguments.reason,
        options=pb.CaptureOptions(**{name: getattr(arguments, name) for name in _OPTIONS}),
    )
    # The daemon enforces its limits; this checks only what the message type cannot hold.
    request.options.wait_steps = _count("--wait", arguments.wait, 0)
    request.options.repeat = _count("--repeat", arguments.repeat, 1)
    if arguments.warmup is not None:
        request.options.warmup_steps = _count("--warmup", arguments.warmup, 0)
    if arguments.steps is not None:
        if not 1 <= arguments.steps <= _MAX_STEPS:
            raise CommandError(f"--steps {arguments.steps}: at least one step, as in --steps 3")
        request.steps = arguments.steps
    elif arguments.seconds is not None:
        request.seconds = _seconds("--seconds", arguments.seconds)
    if arguments.patience is not None:
        request.patience_seconds = _seconds("--patience", arguments.patience)
    return request


def _check_nsight(request: pb.StartCaptureRequest) -> None:
    plain = pb.StartCaptureRequest(options=pb.CaptureOptions(repeat=1))
    if request.options != plain.options or request.HasField("patience_seconds") or request.reason:
        raise CommandError(
            "--nsight records what `nsys launch` was told to; leave out all options but --run, --ranks, --steps, "
            "--seconds, --output and --json"
        )
    if request.WhichOneof("length") is None:
        raise CommandError("--nsight: say how long, as in --seconds 5")


def _count(option: str, value: int, least: int) -> int:
    if not least <= value <= _MAX_STEPS:
        raise CommandError(f"{option} {value}: a number from {least} on is needed, as in {option} 3")
    return value


def _seconds(option: str, value: float) -> float:
    if not math.isfinite(value) or value < 0:
        raise CommandError(f"{option} {value:g}: a number of seconds is needed, as in {option} 2")
    return value
