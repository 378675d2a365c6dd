"""Reading what py-spy wrote. Function and file names are the training process' own choice, so nothing here trusts them:
a line that makes no sense is counted, not raised, and the time taken is linear in the text."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Final, Generic, TypeAlias, TypeVar

from rankscope.daemon.samples import Frame

FRAMES_PER_STACK_LIMIT: Final = 512
NAME_LENGTH_LIMIT: Final = 256

Stack: TypeAlias = tuple[Frame, ...]  # innermost first
Unparsed = TypeVar("Unparsed")

_THREAD: Final = re.compile(r"thread \((\d{1,18})\)(?:: (.*))?")
_TALLY: Final = re.compile(r"Samples: \d{1,12} Errors: (\d{1,12})")
_LINE_LENGTH_LIMIT: Final = 256 * 1024


@dataclass(frozen=True)
class Recording:
    """The stacks of the training thread, and the lines that made no sense."""

    stacks: Counter[Stack]
    garbled_lines: int = 0


@dataclass
class _Thread(Generic[Unparsed]):
    native_id: int
    name: str
    torch_samples: int = 0
    stacks: list[tuple[Unparsed, int]] = field(default_factory=list)


def read_text(path: Path, limit_bytes: int) -> str:
    """What is there, up to the limit; a file that was never written is empty."""
    try:
        with path.open("rb") as file:
            return file.read(limit_bytes).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""


def parse_recording(text: str, pids: Collection[int]) -> Recording:
    """Lines of `py-spy record --format raw --threads`: "thread (TID): NAME;outermost;…;innermost COUNT".

    `pids` are the process' ids in all its namespaces, for the main thread carries one of them."""
    threads: dict[int, _Thread[str]] = {}
    garbled_lines = 0
    for line in text.split("\n"):
        path, _, count = line.rpartition(" ")
        head, _, body = path.partition(";")
        match = _THREAD.fullmatch(head)
        if match is None or not _is_number(count) or len(line) > _LINE_LENGTH_LIMIT:
            garbled_lines += bool(line)
            continue
        native_id = int(match.group(1))
        thread = threads.setdefault(native_id, _Thread(native_id, match.group(2) or ""))
        thread.stacks.append((body, int(count)))
        thread.torch_samples += int(count) if "/torch/" in body else 0
    stacks: Counter[Stack] = Counter()
    training = _training_thread(threads.values(), pids)
    for body, samples in training.stacks if training else ():
        stack = _parse_stack(body)
        if stack is None:
            garbled_lines += 1
        else:
            stacks[stack] += samples
    return Recording(stacks, garbled_lines)


def parse_errors(log: str) -> int:
    """How many samples py-spy says it could not read."""
    tally = _TALLY.search(log)
    return int(tally.group(1)) if tally else 0


def parse_dump(text: str, pids: Collection[int]) -> Stack | None:
    """The training thread's stack from `py-spy dump --json`. Raises ValueError when the text is not that."""
    document = json.loads(text)
    if not isinstance(document, list) or not all(isinstance(entry, dict) for entry in document):
        raise ValueError("py-spy dump did not print a list of threads")
    threads: list[_Thread[Stack]] = []
    for entry in document:
        frames = entry.get("frames")
        if not isinstance(frames, list) or not all(isinstance(frame, dict) for frame in frames):
            raise ValueError("py-spy dump printed a thread without frames")
        stack = tuple(
            Frame(_clean(str(frame.get("name"))), _clean(str(frame.get("filename"))), _integer(frame.get("line")))
            for frame in frames[:FRAMES_PER_STACK_LIMIT]
        )
        torch_samples = int(any("/torch/" in frame.file for frame in stack))
        name = str(entry.get("thread_name") or "")
        threads.append(_Thread(_integer(entry.get("os_thread_id")), name, torch_samples, [(stack, 1)]))
    training = _training_thread(threads, pids)
    return training.stacks[0][0] if training else None


def _training_thread(threads: Iterable[_Thread[Unparsed]], pids: Collection[int]) -> _Thread[Unparsed] | None:
    """The main thread, by its id, else by its name; else the one that is in torch."""
    candidates = list(threads)
    for thread in candidates:
        if thread.native_id in pids:
            return thread
    for thread in candidates:
        if thread.name == "MainThread":
            return thread
    busiest = max(candidates, key=lambda thread: thread.torch_samples, default=None)
    return busiest if busiest is not None and busiest.torch_samples else None


def _parse_stack(body: str) -> Stack | None:
    """A frame is "function (file:line)". File names may hold ';' and brackets, but hardly ");": frames end there."""
    if not body.endswith(")"):
        return None
    tokens = body[:-1].split(");")[-FRAMES_PER_STACK_LIMIT:]
    frames = [_parse_frame(token) for token in reversed(tokens)]
    return tuple(frame for frame in frames if frame is not None)


@lru_cache(maxsize=8192)
def _parse_frame(token: str) -> Frame | None:
    function, bracket, place = token.partition(" (")
    if not bracket:
        return None  # the rest of a file name that holds ");"
    file, _, line = place.rpartition(":")
    if not (file and _is_number(line)):
        file, line = place, "0"  # generated code has no line
    return Frame(_clean(function), _clean(file), int(line))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def _integer(value: object) -> int:
    return value if type(value) is int and 0 <= value < 1 << 31 else 0


def _clean(name: str) -> str:
    """Names end up in terminals and web pages: no control characters, and the end of a long path says more."""
    if len(name) > NAME_LENGTH_LIMIT:
        name = "…" + name[-NAME_LENGTH_LIMIT:]
    return name if name.isprintable() else "".join(c if c.isprintable() else "?" for c in name)
