"""Checks a capture request: bounds, defaults, and error messages; and whether it may leave a process slower."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from rankscope.analysis.traces.joins.comparison import UNMEASURED_SECONDS, LiveSteps, steps_to_record
from rankscope.common.rank_selection import SUSPECTS, ChoiceError, Suspected, UnknownRankError
from rankscope.common.rank_selection import choose_ranks as chosen
from rankscope.common.text import printable
from rankscope.daemon import procfs
from rankscope.daemon.captures.orders import (
    DEFAULT_PATIENCE_SECONDS,
    MAX_PATIENCE_SECONDS,
    MAX_RECORDING_SECONDS,
    MAX_REPEAT,
    MAX_STEPS,
    MAX_WAIT_STEPS,
    MAX_WARMUP_STEPS,
    BadRequestError,
    CaptureError,
    Options,
    UnknownError,
)
from rankscope.daemon.samples import RankProcess
from rankscope.v1 import capture_service_pb2 as pb
from rankscope.v1.job_service_pb2 import Verdict

MAX_START_AHEAD_SECONDS = 600.0
# It becomes the name of a directory.
_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
NAME_CHARACTERS = 200
RUNS_NAMED = 8
TEXT_CHARACTERS = 512
MAX_CULPRITS = 64
_CAUSE_TEXTS = ("phase", "evidence", "bound", "stalls")
SuspectsOf = Callable[[str], Suspected | None]
# The verdict on a job that the correlation has reached; None without a correlation.
VerdictOf = Callable[[str], Verdict | None]


def id_of(request: pb.StartCaptureRequest, now_unix_seconds: float) -> str:
    """The caller's id, or one that contains the time."""
    if not request.id:
        return f"c-{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now_unix_seconds))}-{secrets.token_hex(3)}"
    if _ID.fullmatch(request.id) is None:
        raise BadRequestError(f"id {request.id[:64]!r}: up to 63 lower-case letters, digits and dashes")
    return request.id


def length_of(
    request: pb.StartCaptureRequest, live: Mapping[int, LiveSteps], culprits: Collection[int]
) -> tuple[int | None, float | None]:
    """Steps or seconds; one of them is None. Without a length in the request, as many steps as tell the culprits from
    the other ranks. `live` is by rank, of those to record whose steps are measured."""
    which = request.WhichOneof("length")
    repeat = min(max(1, request.options.repeat), MAX_REPEAT)
    if which is None:
        steps = steps_to_record(live, culprits)
        if steps is None:
            return None, min(UNMEASURED_SECONDS, MAX_RECORDING_SECONDS / repeat)
        return max(1, min(steps, MAX_STEPS // repeat)), None
    if which == "steps":
        if not 1 <= request.steps <= MAX_STEPS:
            raise BadRequestError(f"{request.steps} steps: a capture takes 1 to {MAX_STEPS}")
        return request.steps, None
    if not 0.05 <= request.seconds <= MAX_RECORDING_SECONDS:  # also refuses NaN
        raise BadRequestError(f"{request.seconds:g} seconds: a capture takes 0.05 to {MAX_RECORDING_SECONDS:g}")
    return None, request.seconds


def patience_of(request: pb.StartCaptureRequest) -> float:
    if not request.HasField("patience_seconds"):
        return DEFAULT_PATIENCE_SECONDS
    if not 0 <= request.patience_seconds <= MAX_PATIENCE_SECONDS:
        raise BadRequestError(f"a patience of {request.patience_seconds:g} s: 0 to {MAX_PATIENCE_SECONDS:g} can be had")
    return request.patience_seconds


def start_of(request: pb.StartCaptureRequest, earliest_unix_seconds: float) -> float:
    """When all ranks start: as soon as possible, or at the requested time, which must not be earlier."""
    if not request.HasField("start_unix_millis"):
        return earliest_unix_seconds
    asked = request.start_unix_millis / 1000
    if not earliest_unix_seconds - 0.5 <= asked <= earliest_unix_seconds + MAX_START_AHEAD_SECONDS:
        ahead = asked - earliest_unix_seconds
        raise BadRequestError(
            f"a start {abs(ahead):.1f} s {'after' if ahead > 0 else 'before'} the earliest these ranks can do; it may "
            f"be up to {MAX_START_AHEAD_SECONDS:g} s after; are the clocks of the nodes right?"
        )
    return max(asked, earliest_unix_seconds)


def options_of(request: pb.StartCaptureRequest) -> Options:
    options = request.options
    warmup_steps = options.warmup_steps if options.HasField("warmup_steps") else None
    for asked, limit, what in (
        (options.wait_steps, MAX_WAIT_STEPS, "steps of waiting"),
        (warmup_steps or 0, MAX_WARMUP_STEPS, "steps of warm-up"),
        (options.repeat, MAX_REPEAT, "windows"),
    ):
        if asked > limit:
            raise BadRequestError(f"{asked} {what}: {limit} at most")
    repeat = max(1, options.repeat)
    # The process keeps all windows in memory until the last one ends.
    if repeat * request.steps > MAX_STEPS or repeat * request.seconds > MAX_RECORDING_SECONDS:
        raise BadRequestError(
            f"{repeat} windows of that length: a capture takes {MAX_STEPS} steps or {MAX_RECORDING_SECONDS:g} s in all"
        )
    return Options(
        options.shapes,
        options.stacks,
        options.memory,
        options.flops,
        options.modules,
        options.allow_slowdown,
        options.wait_steps,
        warmup_steps,
        repeat,
    )


def kept_text(text: str) -> str:
    """A caller's text as it may be stored and shown: one line, bounded."""
    return printable(text, TEXT_CHARACTERS).strip()


def kept_verdict(verdict: Verdict) -> Verdict:
    """A verdict as it may be stored and shown: bounded. Its frames and sentences come from containers."""
    kept = Verdict()
    kept.CopyFrom(verdict)
    del kept.culprits[MAX_CULPRITS:]
    del kept.cause.frames[1:]
    for message, names in ((kept, ("group", "reason", "asynchronous")), (kept.cause, _CAUSE_TEXTS)):
        for name in names:
            setattr(message, name, kept_text(getattr(message, name)))
    for frame in kept.cause.frames:
        frame.file, frame.function = kept_text(frame.file), kept_text(frame.function)
    return kept


# Which run and ranks a request is for.


def choose_run(wanted: str, runs: Collection[str], names_others: bool = True) -> str:
    """The requested run; may be omitted if there is only one. A remote caller may not be entitled to see the other
    runs of the node: `names_others` False keeps their names out of the error."""
    seen = sorted(runs)
    known = ", ".join(seen[:RUNS_NAMED]) + (f" and {len(seen) - RUNS_NAMED} more" if len(seen) > RUNS_NAMED else "")
    if not seen and not wanted:
        raise UnknownError("no run is seen now; `rankscope top` shows what is")
    if wanted and wanted not in runs:
        shown = f"there is {known}" if seen and names_others else "`rankscope top` shows what is"
        raise UnknownError(f"no run {wanted[:NAME_CHARACTERS]!r} is seen now; {shown}")
    if not wanted and len(seen) > 1:
        raise BadRequestError(f"several runs are seen{f': {known}' if names_others else ''}; name one with --run")
    return wanted or seen[0]


def choose_processes(
    request: pb.StartCaptureRequest, ranks: Collection[RankProcess], names_others: bool = True
) -> dict[int, RankProcess]:
    """The job's ranks on this node, by number. With `pods`, they are found by their pods: a rank may have moved since
    the caller looked, and the operator may know the job's name before the daemon does."""
    if not request.pods:
        job = choose_run(request.job, {rank.job for rank in ranks}, names_others)
        return {rank.rank: rank for rank in ranks if rank.job == job}
    here = {rank.rank: rank for rank in ranks if _is_asked_for(rank, request)}
    if not here:
        raise CaptureError("no rank of the job runs in the named pods any more; look for them and ask again")
    return here


def _is_asked_for(rank: RankProcess, request: pb.StartCaptureRequest) -> bool:
    pod = request.pods.get(rank.rank)
    # A pod says enough while the operator has not named its run; without a pod, the name decides.
    return pod == (rank.pod or "") and (rank.job == request.job or (bool(pod) and "/" not in rank.job))


def choose_ranks(text: str, job: str, here: Collection[int], world_size: int, suspects_of: SuspectsOf) -> list[int]:
    """Rank numbers, sorted. They need not be on this node; the caller checks that."""
    suspected = suspects_of(job) if text.strip() in SUSPECTS else None
    try:
        return chosen(text, here, world_size, suspected)
    except UnknownRankError as error:
        raise UnknownError(f"run {job!r}: {error}") from error
    except ChoiceError as error:
        kind = CaptureError if text.strip() in SUSPECTS else BadRequestError
        raise kind(f"run {job!r}: {error}") from error


# CUPTI stays attached after a capture and costs a launch-bound job 19–31 % for the rest of its life, unless the process
# was started with TEARDOWN_CUPTI=1.

# An open device file means a CUDA context, now or soon.
_DEVICES = ("/dev/nvidia", "/dev/dxg")
_MAX_DESCRIPTORS = 4096


def uses_cuda(pid: int, proc_root: Path = Path("/proc")) -> bool:
    """Doubtful cases count as yes: the harm is permanent."""
    try:
        return procfs.BLOCKING.call(f"{proc_root}/{pid}", lambda: _has_device(pid, proc_root))
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _has_device(pid: int, proc_root: Path) -> bool:
    for number, descriptor in enumerate((proc_root / str(pid) / "fd").iterdir()):
        if number >= _MAX_DESCRIPTORS:
            return True
        try:
            if str(descriptor.readlink()).startswith(_DEVICES):
                return True
        except OSError:
            continue
    return False


def slowdown_objection(rank: RankProcess, options: Options, proc_root: Path = Path("/proc")) -> str | None:
    if options.allow_slowdown or rank.environment.get("TEARDOWN_CUPTI") == "1" or not uses_cuda(rank.pid, proc_root):
        return None
    return (
        f"{rank} uses CUDA and was started without TEARDOWN_CUPTI=1: a capture could leave "
        "it up to 30 % slower for good; start the job with TEARDOWN_CUPTI=1, or accept that with --allow-slowdown"
    )
