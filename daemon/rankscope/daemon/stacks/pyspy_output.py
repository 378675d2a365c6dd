"""The parser of py-spy's output. The training process chooses the names of functions and files, so nothing here trusts
them: a line that cannot be parsed is counted, not raised, and the time taken is linear in the text."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Generic, TypeAlias, TypeVar

from rankscope.analysis.profiles.frames import Frame, Stack
from rankscope.analysis.profiles.phases import is_engine
from rankscope.common.text import printable

MAX_FRAMES_PER_STACK: Final = 512
MAX_NAME_LENGTH: Final = 256

ThreadIds: TypeAlias = Callable[[], Collection[int]]
Unparsed = TypeVar("Unparsed")

# Before Python 3.11, a thread does not know its id in the kernel: py-spy prints Python's own id, an address.
_THREAD: Final = re.compile(r"thread \((0x[0-9A-F]{1,16}|\d{1,18})\)(?:: (.*))?")
_TALLY: Final = re.compile(r"Samples: \d{1,12} Errors: (\d{1,12})")
_MAX_LINE_LENGTH: Final = 256 * 1024


@dataclass(frozen=True)
class Recording:
    """The stacks of the training thread, and how many lines could not be parsed."""

    stacks: Counter[Stack]
    garbled_lines: int = 0


@dataclass
class _Thread(Generic[Unparsed]):
    native_id: int  # 0: not known
    name: str
    torch_samples: int = 0
    stacks: list[tuple[Unparsed, int]] = field(default_factory=list)


def parse_recording(text: str, pids: Collection[int], engine_threads: ThreadIds = frozenset) -> Recording:
    """Lines of `py-spy record --format raw --threads`: "thread (TID): NAME;outermost;…;innermost COUNT".

    `pids` are the process' ids in all its namespaces: the id of the main thread is one of them. `engine_threads` is
    called for the ids of autograd's own threads only when they matter."""
    threads: dict[str, _Thread[str]] = {}
    garbled_lines = 0
    for line in text.split("\n"):
        path, _, count = line.rpartition(" ")
        head, _, body = path.partition(";")
        match = _THREAD.fullmatch(head)
        if match is None or not _is_number(count) or len(line) > _MAX_LINE_LENGTH:
            garbled_lines += bool(line)
            continue
        shown_id, name = match.groups()
        native_id = int(shown_id) if shown_id.isdigit() else 0
        thread = threads.setdefault(shown_id, _Thread(native_id, name or ""))
        thread.stacks.append((body, int(count)))
        thread.torch_samples += int(count) if "/torch/" in body else 0
    training = _training_thread(threads.values(), pids)
    if training is None:
        return Recording(Counter(), garbled_lines)
    stacks, garbled_stacks = _parse_stacks(training)
    is_in_engine = any(stack and is_engine(stack[0]) for stack in stacks)
    inside: Counter[Stack] = Counter()
    for thread in _candidates_for_engine(threads.values(), training, engine_threads) if is_in_engine else ():
        inside.update(_parse_stacks(thread)[0])
    return Recording(_within_engine(stacks, inside), garbled_lines + garbled_stacks)


def parse_errors(log: str) -> int:
    """How many samples py-spy could not read, by its own count."""
    tally = _TALLY.search(log)
    return int(tally.group(1)) if tally else 0


def parse_dump(text: str, pids: Collection[int], engine_threads: ThreadIds = frozenset) -> Stack | None:
    """The training thread's stack from `py-spy dump --json`. Raises ValueError for any other text."""
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
            for frame in frames[:MAX_FRAMES_PER_STACK]
        )
        torch_samples = int(any("/torch/" in frame.file for frame in stack))
        name = str(entry.get("thread_name") or "")
        threads.append(_Thread(_integer(entry.get("os_thread_id")), name, torch_samples, [(stack, 1)]))
    training = _training_thread(threads, pids)
    if training is None:
        return None
    stack = training.stacks[0][0]
    if stack and is_engine(stack[0]):
        for thread in _candidates_for_engine(threads, training, engine_threads):
            return (*thread.stacks[0][0], *stack)[:MAX_FRAMES_PER_STACK]
    return stack


def _candidates_for_engine(
    threads: Iterable[_Thread[Unparsed]], training: _Thread[Unparsed], engine_threads: ThreadIds
) -> list[_Thread[Unparsed]]:
    """Threads of autograd that were seen in Python code. Python did not start them, so py-spy has no name for them."""
    nameless = [
        thread
        for thread in threads
        if thread is not training
        and (not thread.name or thread.name.startswith("Dummy-"))
        and any(body for body, _ in thread.stacks)
    ]
    ids = engine_threads() if nameless else ()
    return [thread for thread in nameless if thread.native_id in ids]


def _within_engine(stacks: Counter[Stack], inside: Counter[Stack]) -> Counter[Stack]:
    """On a GPU, autograd runs backward on a thread of its own while the training thread waits in the engine. Samples of
    the two threads come without times, but Python code on the one implies that the other waits: each stack of the
    engine's thread takes the place of as many waiting samples."""
    merged = Counter(stacks)
    waiting = [stack for stack, _ in stacks.most_common() if stack and is_engine(stack[0])]
    for inner, samples in inside.most_common():
        left = samples if inner else 0
        for outer in waiting:
            taken = min(left, merged[outer])
            if taken:
                merged[(*inner, *outer)[:MAX_FRAMES_PER_STACK]] += taken
                merged[outer] -= taken
                left -= taken
    return +merged


def _training_thread(threads: Iterable[_Thread[Unparsed]], pids: Collection[int]) -> _Thread[Unparsed] | None:
    """The main thread, by its id, else by its name; else the only one, or the one that is in torch."""
    candidates = list(threads)
    for thread in candidates:
        if thread.native_id in pids:
            return thread
    for thread in candidates:
        if thread.name == "MainThread":
            return thread
    if len(candidates) == 1 and not candidates[0].native_id:
        return candidates[0]
    busiest = max(candidates, key=lambda thread: thread.torch_samples, default=None)
    return busiest if busiest is not None and busiest.torch_samples else None


def _parse_stacks(thread: _Thread[str]) -> tuple[Counter[Stack], int]:
    """The stacks, and how many could not be parsed."""
    stacks: Counter[Stack] = Counter()
    garbled = 0
    for body, samples in thread.stacks:
        stack = _parse_stack(body)
        if stack is None:
            garbled += 1
        else:
            stacks[stack] += samples
    return stacks, garbled


def _parse_stack(body: str) -> Stack | None:
    """A frame is "function (file:line)". File names may contain ";" and brackets, but rarely ");": frames end there."""
    if not body.endswith(")"):
        return None
    tokens = body[:-1].split(");")[-MAX_FRAMES_PER_STACK:]
    frames = [_parse_frame(token) for token in reversed(tokens)]
    return tuple(frame for frame in frames if frame is not None)


@lru_cache(maxsize=8192)
def _parse_frame(token: str) -> Frame | None:
    function, bracket, place = token.partition(" (")
    if not bracket:
        return None  # the rest of a file name that contains ");"
    file, _, line = place.rpartition(":")
    if not (file and _is_number(line)):
        file, line = place, "0"  # generated code has no line
    return Frame(_clean(function), _clean(file), int(line))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def _integer(value: object) -> int:
    return value if type(value) is int and 0 <= value < 1 << 31 else 0


def _clean(name: str) -> str:
    """Names are shown in terminals and web pages: no control characters, and the end of a long path matters most."""
    return printable(name if len(name) <= MAX_NAME_LENGTH else "…" + name[-MAX_NAME_LENGTH:])
