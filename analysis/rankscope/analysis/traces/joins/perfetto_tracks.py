"""Tracks of a merged trace: one process per rank, in which its host's threads and its devices' streams are threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

RawEvent: TypeAlias = dict[str, msgspec.Raw]

# A rank's process has this number plus the rank: no process is 0, which viewers take for the kernel's idle task.
FIRST_PROCESS = 1_000_000
# Beyond what an operating system gives to threads; for tracks whose own number is taken or no number at all.
_FIRST_OWN_THREAD = 1 << 23
_DEVICE_ORDER, _OTHER_ORDER = 1 << 24, 1 << 25

ON_DEVICE = frozenset(
    f'"{category}"'.encode()
    for category in (
        "kernel",
        "gpu_memcpy",
        "gpu_memset",
        "gpu_user_annotation",
        "cuda_sync",
        "hip_sync",
        "mtia_ccp_events",
    )
)
PROCESS_NOTES = frozenset({b'"process_name"', b'"process_labels"', b'"process_sort_index"'})
THREAD_NOTES = frozenset({b'"thread_name"', b'"thread_sort_index"'})


@dataclass
class RankTracks:
    """What a rank's file calls (process, thread) gets one thread number. Devices of one process may have streams of
    equal number, and so may a device and the host."""

    position: int  # of the rank among all: the order of the tracks
    rank: int
    _threads: dict[tuple[bytes, bytes], int] = field(default_factory=dict)
    _taken: set[int] = field(default_factory=set)
    _on_device: set[tuple[bytes, bytes]] = field(default_factory=set)
    _noted: dict[tuple[bytes, bytes], list[RawEvent]] = field(default_factory=dict)

    @property
    def process(self) -> int:
        return FIRST_PROCESS + self.rank

    def thread(self, pid: bytes, tid: bytes, category: bytes) -> int:
        key = (pid, tid)
        if category in ON_DEVICE:
            self._on_device.add(key)
        number = self._threads.get(key)
        if number is None:
            number = int(tid) if tid.isdigit() and pid.isdigit() and len(tid) < 10 else _FIRST_OWN_THREAD
            while number in self._taken:
                number = max(number + 1, _FIRST_OWN_THREAD)
            self._threads[key] = number
            self._taken.add(number)
        return number

    def note_thread(self, pid: bytes, tid: bytes, event: RawEvent) -> None:
        """Kept until it is known which threads have events: a trace names the streams of devices it never used."""
        self._noted.setdefault((pid, tid), []).append(event)

    def notes(self) -> Iterator[dict[str, Any]]:
        """What names and orders the process and its threads: host, then devices, then what the profiler adds."""
        yield self._note("process_name", 0, name=f"rank {self.rank}")
        yield self._note("process_sort_index", 0, sort_index=self.position)
        for (pid, tid), number in self._threads.items():
            if (pid, tid) in self._on_device:
                device, stream = pid.decode(errors="replace"), tid.decode(errors="replace")
                order = _DEVICE_ORDER + (int(stream) if stream.isdigit() else 0)
                yield self._note("thread_name", number, name=f"GPU {device} stream {stream}")
                yield self._note("thread_sort_index", number, sort_index=order)
            elif not pid.isdigit():
                name = tid.decode(errors="replace").strip('"') or "profiler"
                yield self._note("thread_name", number, name=name)
                yield self._note("thread_sort_index", number, sort_index=_OTHER_ORDER)
            else:
                for event in self._noted.get((pid, tid), []):
                    yield {**event, "pid": self.process, "tid": number}

    def _note(self, kind: str, thread: int, **arguments: object) -> dict[str, Any]:
        return {"name": kind, "ph": "M", "pid": self.process, "tid": thread, "ts": 0, "args": arguments}
