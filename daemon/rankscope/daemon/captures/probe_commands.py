"""The daemon's side of the command area in a probe's ring: writes commands, reads answers. An answer is hostile
input, like everything else in a ring."""

from __future__ import annotations

import contextlib
import os
import secrets
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from rankscope.common.text import printable
from rankscope.daemon.captures.fetch import MAX_SIZE_BYTES, copy_file
from rankscope.daemon.captures.orders import CaptureError, Options, Reserve
from rankscope.daemon.samples import RankProcess
from rankscope.daemon.steps import ring_reader
from rankscope.daemon.steps.ring_reader import Header, RingError
from rankscope.probe import ring_layout

_MAX_STEP: Final = 1 << 62


@dataclass(frozen=True)
class Command:
    """What the probe should record. `start_step` 0: start by time."""

    number: int
    start_unix_nanos: int
    start_step: int
    warmup_steps: int
    steps: int  # 0: as many as fit into the length
    length_nanos: int
    give_up_unix_nanos: int
    options: Options
    wait_steps: int = 0
    windows: int = 1
    verb: int = ring_layout.VERB_CAPTURE


@dataclass(frozen=True)
class Answer:
    text: str
    number: int
    phase: int
    first_step: int
    start_unix_nanos: int
    steps: int
    fd: int
    trace_bytes: int
    start_nanos: int
    stop_nanos: int
    write_nanos: int


def new_number() -> int:
    return secrets.randbelow((1 << 32) - 1) + 1


@contextlib.contextmanager
def opened(rank: RankProcess, proc_root: Path = Path("/proc")) -> Iterator[tuple[int, Header]]:
    """A rank's ring, checked for capture support; raises CaptureError otherwise."""
    try:
        with ring_reader.opened(proc_root, rank.pid) as fd:
            if fd is None:
                raise CaptureError(f"{rank} runs without the probe, or has not ended a step yet")
            header = ring_reader.read_header(fd)
            own_pid = rank.namespace_pids[-1] if rank.namespace_pids else rank.pid
            if header.owner_pid != own_pid:
                raise CaptureError(f"{rank}: its ring belongs to pid {header.owner_pid}, not to {own_pid}; not touched")
            if header.disabled:
                raise CaptureError(f"{rank}: the probe has disabled itself; its reason is on the process' stderr")
            if not header.takes_captures:
                raise CaptureError(f"{rank}: its probe is too old to capture; start the job with a newer one")
            yield fd, header
    except RingError as error:
        raise CaptureError(f"{rank}: {error}") from error
    except OSError as error:
        raise CaptureError(f"{rank}: its ring cannot be reached: {error.strerror}") from error


def write_command(ring: int, command: Command) -> None:
    """Write the body first, then the number that announces it. Opened briefly and write-only: the mode in which a
    ring is open distinguishes its owner from readers."""
    options = command.options
    chosen = (options.shapes, options.stacks, options.memory, options.flops, options.modules)
    body = ring_layout.COMMAND.pack(
        command.number,
        command.verb,
        sum(1 << bit for bit, is_chosen in enumerate(chosen) if is_chosen)
        | (command.windows - 1) << ring_layout.MORE_WINDOWS_SHIFT,
        command.start_unix_nanos,
        command.start_step,
        command.wait_steps,
        command.warmup_steps,
        command.steps,
        command.length_nanos,
        command.give_up_unix_nanos,
    )
    descriptor = os.open(f"/proc/self/fd/{ring}", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(descriptor, body + ring_layout.CHECKSUM.pack(zlib.crc32(body)), ring_layout.COMMAND_BODY_OFFSET)
        os.pwrite(descriptor, ring_layout.COMMAND_NUMBER.pack(command.number), ring_layout.COMMAND_OFFSET)
    finally:
        os.close(descriptor)


def ask_for_recorder(ring: int, give_up_unix_nanos: int) -> Command:
    """Ask the probe for the records of torch's flight recorder. It answers while no step ends."""
    command = Command(new_number(), 0, 0, 0, 0, 0, give_up_unix_nanos, Options(), verb=ring_layout.VERB_RECORDER)
    write_command(ring, command)
    return command


def drop(ring: int, command: Command) -> None:
    """Tell the probe that a capture is no longer needed: fetched or abandoned."""
    write_command(ring, replace(command, number=new_number(), verb=ring_layout.VERB_DROP, start_step=command.number))


def read_answer(ring: int) -> Answer | None:
    """None if there is none yet, or it is being written."""
    for _ in range(ring_reader.TORN_READ_RETRIES):
        raw = os.pread(ring, ring_layout.HEADER_BYTES - ring_layout.ANSWER_OFFSET, ring_layout.ANSWER_OFFSET)
        if len(raw) < ring_layout.HEADER_BYTES - ring_layout.ANSWER_OFFSET:
            return None
        *numbers, length = ring_layout.ANSWER.unpack_from(raw)
        end = ring_layout.ANSWER.size + length
        if length > ring_layout.ANSWER_TEXT_BYTES or ring_layout.CHECKSUM.unpack_from(raw, end)[0] != zlib.crc32(
            raw[:end]
        ):
            continue
        text = raw[ring_layout.ANSWER.size : end].decode("utf-8", "replace")
        return Answer(printable(text), *numbers)
    return None


def plausible(answer: Answer) -> bool:
    return (
        ring_layout.PHASE_ARMED <= answer.phase <= ring_layout.PHASE_OFF
        and 0 <= answer.first_step < _MAX_STEP
        and min(answer.start_nanos, answer.stop_nanos, answer.write_nanos, answer.trace_bytes) >= 0
    )


def take_trace(
    rank: RankProcess,
    answer: Answer,
    target: Path,
    reserve: Reserve,
    proc_root: Path,
    limit_bytes: int | None = None,
) -> None:
    """Copy the trace that the probe holds in memory; it is sealed and cannot change."""
    if not 0 <= answer.fd < 1 << 30:
        raise CaptureError(f"{rank}: the probe names descriptor {answer.fd}; is its ring being forged?")
    link = proc_root / str(rank.pid) / "fd" / str(answer.fd)
    needed = ring_layout.F_SEAL_SHRINK | ring_layout.F_SEAL_GROW | ring_layout.F_SEAL_WRITE
    try:
        if not str(link.readlink()).startswith(f"/memfd:{ring_layout.TRACE_NAME}"):
            raise CaptureError(f"{rank}: {link} is not a trace of the probe's; not touched")
        source = ring_reader.open_memfd(str(link))
    except (OSError, RingError) as error:
        raise CaptureError(f"{rank}: the trace cannot be fetched: {error}") from error
    with os.fdopen(source, "rb", buffering=0) as trace:
        if ring_reader.seals_of(source) & needed != needed:
            raise CaptureError(f"{rank}: {link} is not sealed; it was not written by the probe; not touched")
        status = os.fstat(source)
        allowed = MAX_SIZE_BYTES if limit_bytes is None else limit_bytes
        if status.st_size > allowed:
            raise CaptureError(
                f"{rank}: the trace has {status.st_size} bytes, {allowed} are allowed; capture fewer steps"
            )
        copy_file(trace, target, status.st_size, f"{rank}: the trace of the probe", reserve)


# Splits several windows that the probe packed into one trace. The sizes in it are hostile input too.


def window_file(first: Path, number: int) -> Path:
    """For window 0, 1, 2, …: `rank3.json`, `rank3.window2.json`, `rank3.window3.json`; artifacts are named alike."""
    name, dot, kinds = first.name.partition(".")
    return first.with_name(f"{name}.window{number + 1}{dot}{kinds}") if number else first


def take_apart(packed: Path, most: int, who: str) -> tuple[Path, ...]:
    """The files of all windows; the packed file becomes the first. Raises CaptureError if the format is wrong."""
    with packed.open("r+b") as file:
        sizes = _sizes(file.fileno(), most)
        if sizes is None:
            raise CaptureError(f"{who}: what the probe handed over is not a trace of several windows; not kept")
        paths = [window_file(packed, number) for number in range(len(sizes))]
        offset = sizes[0]
        for path, size in zip(paths[1:], sizes[1:], strict=True):
            with path.open("xb") as window:
                left = size
                while left > 0 and (sent := os.sendfile(window.fileno(), file.fileno(), offset, left)) > 0:
                    offset, left = offset + sent, left - sent
        file.truncate(sizes[0])
    return tuple(paths)


def _sizes(descriptor: int, most: int) -> list[int] | None:
    total = os.fstat(descriptor).st_size
    end = os.pread(descriptor, ring_layout.WINDOWS.size, max(0, total - ring_layout.WINDOWS.size))
    count, mark = ring_layout.WINDOWS.unpack(end) if len(end) == ring_layout.WINDOWS.size else (0, b"")
    table_bytes = count * ring_layout.WINDOW_BYTES.size
    if mark == ring_layout.WINDOWS_MARK and 0 < count <= most and total >= table_bytes + len(end):
        table = os.pread(descriptor, table_bytes, total - len(end) - table_bytes)
        sizes = [size for (size,) in ring_layout.WINDOW_BYTES.iter_unpack(table)]
        if sum(sizes) == total - len(end) - table_bytes:
            return sizes
    return None
