"""Reads of /proc that the process can block. For most files of /proc/<pid> the kernel waits for a lock that the process
holds while it execs. That can take without limit: an exec closes files, and a FUSE mount may never answer. Such reads
are made in a thread. One that does not return in time is left behind, and its process is skipped until it does."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, TypeVar

PATIENCE_SECONDS, MIN_PATIENCE_SECONDS = 0.2, 0.05
# A thread that is ready to run and does not get to it waits for a CPU, not for the process that it reads. It is waited
# for longer, but not without end.
LOOKS_AT_A_READY_THREAD: Final = 20
# With more CPU time than this, in clock ticks, it runs: a process can make a read of it expensive.
RUNNING_TICKS: Final = 5
# An owner whose processes blocked so often in the last minute is skipped.
BLOCKS_PER_OWNER: Final = 16
REMEMBERED_SECONDS: Final = 60.0
# A thread that is left behind costs some tens of kilobytes.
MAX_LEFT_BEHIND: Final = 256
_NOTHING: Final = object()

Item = TypeVar("Item")
Result = TypeVar("Result")


class BlockedError(PermissionError):
    """Not now: the process blocks what would be read of it."""


@dataclass(eq=False)
class _Sweep:
    todo: deque[Any]
    read: Callable[[Any], None]
    item: Any = _NOTHING  # that is read now
    done: int = 0
    error: BaseException | None = None
    thread_id: int = 0  # of the thread that reads
    blocked: str | None = None  # the process, once the sweep was left behind there
    has_ended: threading.Event = field(default_factory=threading.Event)


class BlockingReads:
    """May be used from several threads, but not from its own."""

    def __init__(self, owner_of: Callable[[str], str]) -> None:
        self._owner_of = owner_of
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[_Sweep]] = []
        self._left_behind: set[str] = set()  # processes
        self._blocks: deque[tuple[float, str]] = deque()  # when, and whose

    @property
    def blocked(self) -> int:
        """How many processes block a read now."""
        return len(self._left_behind)

    def call(self, process: str, read: Callable[[], Result]) -> Result:
        """What `read` returns or raises; BlockedError if it does not return, or has not since the last call."""
        results: list[Result] = []
        if self.each([process], str, lambda _: results.append(read())):
            raise BlockedError(f"{process} blocks those who read it")
        return results[0]

    def each(
        self, items: Iterable[Item], process_of: Callable[[Item], str], read: Callable[[Item], None]
    ) -> Sequence[Item]:
        """Call `read` for each item, one after the other. Returns those that were skipped or left behind."""
        todo = deque(items)
        blocked: list[Item] = []
        while todo := self._allowed(todo, process_of, blocked):
            sweep = _Sweep(todo, read)
            with self._lock:
                orders = self._idle.pop() if self._idle else self._start()
            orders.put(sweep)
            while (done := self._done_when_it_stalled(sweep)) is not None:
                with self._lock:
                    if sweep.has_ended.is_set() or sweep.done != done:
                        continue  # it has just gone on
                    sweep.blocked = process_of(sweep.item)
                    self._left_behind.add(sweep.blocked)
                    self._blocks.append((time.monotonic(), self._owner_of(sweep.blocked)))
                    blocked.append(sweep.item)
                    break
            if sweep.error is not None:
                raise sweep.error
        return blocked

    def _done_when_it_stalled(self, sweep: _Sweep) -> int | None:
        """How many reads were done when it made no progress any more; None when it has ended. The more processes block,
        the less is waited for the next one."""
        done, looks, first_ticks = -1, 0, 0
        while not sweep.has_ended.wait(max(MIN_PATIENCE_SECONDS, PATIENCE_SECONDS / (1 + len(self._blocks)))):
            if done != sweep.done or sweep.item is _NOTHING:
                # A thread that has not begun yet has all of the patience when it begins.
                done, looks = -1 if sweep.item is _NOTHING else sweep.done, 0
                continue
            looks += 1
            ticks = _ticks_of_ready(sweep.thread_id)
            if looks == 1 and ticks is not None:
                first_ticks = ticks
            if ticks is None or ticks - first_ticks >= RUNNING_TICKS or looks == LOOKS_AT_A_READY_THREAD:
                return done
        return None

    def _allowed(self, todo: deque[Item], process_of: Callable[[Item], str], blocked: list[Item]) -> deque[Item]:
        """Those that may be read now; the others are added to `blocked`."""
        with self._lock:
            while self._blocks and self._blocks[0][0] < time.monotonic() - REMEMBERED_SECONDS:
                self._blocks.popleft()
            counts = Counter(owner for _, owner in self._blocks)
            left_behind = frozenset(self._left_behind)
        if not counts and not left_behind:
            return todo
        often = {owner for owner, count in counts.items() if count >= BLOCKS_PER_OWNER}
        allowed: deque[Item] = deque()
        for item in todo:
            process = process_of(item)
            is_skipped = process in left_behind or len(left_behind) >= MAX_LEFT_BEHIND
            is_skipped = is_skipped or (bool(often) and self._owner_of(process) in often)
            (blocked if is_skipped else allowed).append(item)
        return allowed

    def _start(self) -> SimpleQueue[_Sweep]:
        orders: SimpleQueue[_Sweep] = SimpleQueue()
        threading.Thread(target=self._run, args=(orders,), name="rankscope-reads", daemon=True).start()
        return orders

    def _run(self, orders: SimpleQueue[_Sweep]) -> None:
        while True:
            sweep = orders.get()
            while True:
                with self._lock:
                    if sweep.blocked is not None:
                        self._left_behind.discard(sweep.blocked)
                        return  # another thread does the rest
                    if sweep.error is not None or not sweep.todo:
                        self._idle.append(orders)
                        sweep.has_ended.set()
                        break
                    sweep.thread_id = threading.get_native_id()
                    sweep.item = sweep.todo.popleft()
                try:
                    sweep.read(sweep.item)
                except BaseException as error:  # noqa: BLE001 - raised again by `each`, in the thread that called it
                    sweep.error = error
                sweep.done += 1


def _ticks_of_ready(thread_id: int) -> int | None:
    """The CPU time of a thread of ours that runs or waits for a CPU: on a busy machine, or after the machine stood
    still. None for one that waits for something else."""
    try:
        fields = Path(f"/proc/self/task/{thread_id}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return int(fields[11]) + int(fields[12]) if fields[0] == b"R" else None
