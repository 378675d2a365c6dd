"""The last records of torch's flight recorder of ranks that hang: from the probe, which hands them over while no step
ends, and where it does not answer, from the files that torch itself writes on a timeout.

A dump is hostile input. It is fetched as a trace is, and parsed in a separate process with limits
(`python -m rankscope.daemon.captures.flight_recorder FOLDER`), one for all ranks of a request."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from rankscope.analysis.collectives.flight_recorder.catalog import DumpError
from rankscope.analysis.collectives.flight_recorder.tail import MAX_TAIL_BYTES, make_tail
from rankscope.common.text import printable
from rankscope.daemon import procfs
from rankscope.daemon.captures import probe_commands as commands
from rankscope.daemon.captures.fetch import NotThereError, take_file
from rankscope.daemon.captures.orders import CaptureError
from rankscope.daemon.captures.probe_commands import Answer, Command
from rankscope.daemon.captures.processing.sandbox import confine, run_module
from rankscope.daemon.samples import RankKey, RankProcess
from rankscope.daemon.steps import ring_reader
from rankscope.probe import ring_layout
from rankscope.v1.profile_service_pb2 import FlightRecorderTail

PROBE: Final = "probe"
# The probe answers while no step ends, and then looks for commands five times a second. While steps end it is not
# asked: a command for a capture may wait there.
STALLED_SECONDS: Final = 2.0
ANSWER_SECONDS: Final = 3.0
TICK_SECONDS: Final = 0.05
# The probe ignores a command that is older. Longer than the daemon waits: a machine may pause for seconds.
COMMAND_SECONDS: Final = 15.0
PARSE_SECONDS: Final = 6.0
PARSE_CPU_SECONDS: Final = 5
PARSE_MEMORY_BYTES: Final = 1 << 30
# Of a request. Their tails together fit into one gRPC message.
MAX_RANKS: Final = 32
TEXT_CHARACTERS: Final = 512
_TOO_MANY: Final = f"the recorders of {MAX_RANKS} ranks are read at a time; name fewer ranks"
_NEXT: Final = (
    "start the job with the probe, or with TORCH_NCCL_DUMP_ON_TIMEOUT=1 and TORCH_FR_DUMP_TEMP_FILE=/shared/fr_ (NCCL)"
)


def read_tails(ranks: Sequence[RankProcess], proc_root: Path = Path("/proc")) -> dict[RankKey, FlightRecorderTail]:
    """Of each rank a tail, or why there is none. Takes seconds. Never raises."""
    chosen = ranks[:MAX_RANKS]
    tails = {rank.key: FlightRecorderTail(problem=_TOO_MANY) for rank in ranks}
    if not chosen:
        return tails
    try:
        with tempfile.TemporaryDirectory(prefix="rankscope-recorders-") as folder:
            tails.update(_read(chosen, Path(folder), proc_root))
    except OSError as error:
        problem = printable(f"dumps cannot be copied to {tempfile.gettempdir()}: {error}", TEXT_CHARACTERS)
        tails.update({rank.key: FlightRecorderTail(problem=problem) for rank in chosen})
    return tails


def _read(ranks: Sequence[RankProcess], folder: Path, proc_root: Path) -> Iterator[tuple[RankKey, FlightRecorderTail]]:
    targets = {rank.key: folder / f"{number}.dump" for number, rank in enumerate(ranks)}
    from_probes = _fetch_from_probes(ranks, targets, proc_root)
    sources: dict[RankKey, str] = {}
    for rank in ranks:
        found = from_probes[rank.key]
        if found.problem:
            try:
                sources[rank.key] = _fetch_file(rank, targets[rank.key], found.step_unix_seconds, proc_root)
            except CaptureError as error:
                yield rank.key, FlightRecorderTail(problem=printable(f"{found.problem}; {error}", TEXT_CHARACTERS))
        else:
            sources[rank.key] = PROBE
    unread = "its dump was not read"
    if sources:
        try:
            run_module(__spec__.name, folder, seconds=PARSE_SECONDS, what="reading the flight recorders")
        except CaptureError as error:
            unread = str(error)
    for key, source in sources.items():
        yield key, _result(targets[key], printable(source, TEXT_CHARACTERS), unread)


def _result(target: Path, source: str, unread: str) -> FlightRecorderTail:
    with suppress(FileNotFoundError):
        return FlightRecorderTail(records=target.with_suffix(".json").read_bytes(), source=source)
    with suppress(FileNotFoundError):
        unread = f"the dump is not usable: {target.with_suffix('.problem').read_text()}"
    return FlightRecorderTail(source=source, problem=printable(unread, TEXT_CHARACTERS))


# The probe.


@dataclass(frozen=True)
class _Asked:
    problem: str = ""  # why the probe did not hand the recorder over
    step_unix_seconds: float | None = None  # when the last step ended


def _fetch_from_probes(
    ranks: Sequence[RankProcess], targets: Mapping[RankKey, Path], proc_root: Path
) -> dict[RankKey, _Asked]:
    """All probes are asked at the same time."""
    results: dict[RankKey, _Asked] = {}
    waiting: dict[RankKey, tuple[RankProcess, int, Command]] = {}
    steps: dict[RankKey, float | None] = {}
    with ExitStack() as stack:
        for rank in ranks:
            steps[rank.key] = None
            try:
                ring, header = stack.enter_context(commands.opened(rank, proc_root))
                since = ring_reader.seconds_since_last_step(ring, header)
                steps[rank.key] = None if since is None else time.time() - since
                if not header.hands_over_recorder:
                    raise CaptureError("the probe has found no flight recorder in the process")
                if since is not None and since < STALLED_SECONDS:
                    raise CaptureError(f"{rank}: its steps end; the probe hands the recorder over while none does")
                command = commands.ask_for_recorder(ring, time.time_ns() + round(COMMAND_SECONDS * 1e9))
                stack.callback(_drop, ring, command)
                waiting[rank.key] = (rank, ring, command)
            except (CaptureError, OSError) as error:
                results[rank.key] = _Asked(str(error), steps[rank.key])
        # Ticks are counted, not seconds: a pause of the machine leaves the probe as much time as before.
        for _ in range(round(ANSWER_SECONDS / TICK_SECONDS)):
            for key, (rank, ring, command) in list(waiting.items()):
                answer = _answer(ring, command)
                if answer is not None:
                    del waiting[key]
                    results[key] = _Asked(_take(rank, answer, targets[key], proc_root), steps[key])
            if not waiting:
                break
            time.sleep(TICK_SECONDS)
        for key in waiting:
            silent = f"the probe did not answer within {ANSWER_SECONDS:g} s: no Python code can run, or a capture ends"
            results[key] = _Asked(silent, steps[key])
    return results


def _drop(ring: int, command: Command) -> None:
    with suppress(OSError):
        commands.drop(ring, command)


def _answer(ring: int, command: Command) -> Answer | None:
    answer = commands.read_answer(ring)
    is_answer = answer is not None and answer.number == command.number and commands.plausible(answer)
    return answer if is_answer else None


def _take(rank: RankProcess, answer: Answer, target: Path, proc_root: Path) -> str:
    """Why there is nothing to take; empty if it was taken."""
    if answer.phase != ring_layout.PHASE_WRITTEN:
        return f"the probe could not dump the flight recorder: {answer.text}"
    try:
        limit_bytes = ring_layout.MAX_RECORDER_BYTES
        commands.take_trace(rank, answer, target, _reserve, proc_root, limit_bytes)
    except (CaptureError, OSError) as error:
        return str(error)
    return ""


def _reserve(target: Path, size_bytes: int) -> None:
    """Dumps are small, and removed at once."""


# Files of torch.


def dump_paths(environment: Mapping[str, str], rank: int) -> tuple[str, ...]:
    """Where torch writes the dump of a rank, by its versions: the newest first."""
    prefix = environment.get("TORCH_FR_DUMP_TEMP_FILE") or environment.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    if prefix:
        return (f"{prefix}{rank}",)
    home = environment.get("HOME") or "/tmp"
    caches = (environment.get("XDG_CACHE_HOME") or f"{home}/.cache", f"{home}/.cache")
    names = ("comm_lib_trace_rank_", "nccl_trace_rank_")
    places = [f"{cache}/torch/{name}{rank}" for name in names for cache in caches]
    return tuple(dict.fromkeys([*places, f"/tmp/nccl_trace_rank_{rank}"]))


def _fetch_file(rank: RankProcess, target: Path, step_unix_seconds: float | None, proc_root: Path) -> str:
    """The path of the file, as the process sees it. Raises CaptureError."""
    paths = dump_paths(rank.environment, rank.rank)
    limit_bytes = ring_layout.MAX_RECORDER_BYTES
    problem = f"torch has written no dump to {paths[0]}; {_NEXT}"
    for path in paths:
        if not path.startswith("/"):
            raise CaptureError(f"torch writes its dump to {path}, which is not absolute; {_NEXT}")
        take = partial(take_file, rank.pid, path, target, _reserve, proc_root, limit_bytes)
        try:
            status = procfs.BLOCKING.call(f"{proc_root}/{rank.pid}", take)
        except NotThereError:
            continue
        except OSError as error:
            raise CaptureError(f"{path} cannot be read: {error}") from error
        # Without steps: files of an earlier process.
        begin, what = step_unix_seconds, "last step"
        if begin is None:
            begin, what = _start_unix_seconds(rank), "start"
        if status.st_mtime >= begin:
            return path
        target.unlink()
        problem = f"{path} is older than the {what} of the process, so it is not of this hang; {_NEXT}"
    raise CaptureError(problem)


def _start_unix_seconds(rank: RankProcess) -> float:
    up_seconds = time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.time() - up_seconds + rank.start_ticks / procfs.CLOCK_TICKS_PER_SECOND


# The separate process.


def _parse_all(folder: Path) -> None:
    """The smallest first: one that takes all of the time must not take that of the others."""
    confine(memory_bytes=PARSE_MEMORY_BYTES, cpu_seconds=PARSE_CPU_SECONDS, file_bytes=MAX_TAIL_BYTES)
    for path in sorted(folder.glob("*.dump"), key=lambda one: one.stat().st_size):
        draft = path.with_suffix(".draft")
        try:
            draft.write_bytes(make_tail(path.read_bytes()))
            draft.rename(path.with_suffix(".json"))
        except DumpError as error:
            path.with_suffix(".problem").write_text(str(error))
        except MemoryError:
            path.with_suffix(".problem").write_text("it takes too much memory; record less with TORCH_FR_BUFFER_SIZE")


if __name__ == "__main__":
    _parse_all(Path(sys.argv[1]))
