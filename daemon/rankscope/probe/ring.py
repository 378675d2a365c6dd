"""The writer's side of the ring: a sealed memfd that the daemon finds under /proc/<pid>/fd."""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import time
import zlib
from typing import Any, Dict, Optional, Sequence, Tuple

from . import ring_layout


def sealed_memory(name: str, size: int) -> int:
    """A descriptor. Nobody can shrink the file under a reader, which would be a SIGBUS for it."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    seals = ring_layout.F_SEAL_SHRINK | ring_layout.F_SEAL_GROW | ring_layout.F_SEAL_SEAL
    fcntl.fcntl(descriptor, ring_layout.F_ADD_SEALS, seals)
    return descriptor


def _at_preferred_number(descriptor: int) -> int:
    for number in ring_layout.DESCRIPTORS:
        try:
            copy = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, number)
        except OSError:
            return descriptor
        if copy == number:
            os.close(descriptor)
            return copy
        os.close(copy)
    return descriptor


class Ring:
    """Nothing is on disk, nothing is left behind: the kernel frees it with the process, and exec closes it."""

    def __init__(self, facts: Optional[Dict[str, Any]] = None) -> None:
        self._fd = _at_preferred_number(sealed_memory(ring_layout.RING_NAME, ring_layout.RING_BYTES))
        self._inode = os.fstat(self._fd).st_ino
        self._memory = mmap.mmap(self._fd, ring_layout.RING_BYTES)
        # Each is stored as one word. `pack_into` writes zeros first, which a reader would take for a ring that began
        # again.
        counters_end = ring_layout.COUNTERS_OFFSET + ring_layout.COUNTERS.size
        self._counters = memoryview(self._memory)[ring_layout.COUNTERS_OFFSET : counters_end].cast("Q")
        self._facts: bytes = b""
        self.records = 0
        self.steps = 0
        self._write_state(ring_layout.STATE_RUNNING)
        self.write_abilities(ring_layout.TAKES_CAPTURES)
        self.write_live((-1, -1, -1, -1), (-1, -1))
        if facts is not None:
            self.write_facts(facts)
        # Last: with it, the ring is one.
        fixed = ring_layout.fixed_part(
            ring_layout.MAGIC,
            ring_layout.VERSION,
            ring_layout.HEADER_BYTES,
            ring_layout.RECORD_BYTES,
            ring_layout.CAPACITY,
            os.getpid(),
        )
        self._memory[: len(fixed)] = fixed

    def append(
        self,
        end_ns: int,
        span_ns: int,
        seconds: Dict[str, float],
        flags: int,
        steps: int,
        host_end_ns: Optional[int] = None,
    ) -> None:
        """One record; `seconds` are those of layout.SECONDS that were measured, and without `host_end_ns` the host ends
        with the step. The checksum covers the sequence number and the ring's counters move last: a reader that comes in
        between finds neither the old record nor the new one, never a mixture."""
        offset = ring_layout.HEADER_BYTES + self.records % ring_layout.CAPACITY * ring_layout.RECORD_BYTES
        self.records += 1
        self.steps += steps
        written = min(steps, ring_layout.MAX_STEPS)
        # A name that the record does not have makes one value too many, which raises.
        named = {**ring_layout.NOT_MEASURED, **seconds}
        host_end_ns = end_ns if host_end_ns is None else host_end_ns
        body = ring_layout.RECORD.pack(self.records, end_ns, host_end_ns, span_ns, *named.values(), flags, written)
        self._memory[offset : offset + ring_layout.RECORD_BYTES] = body + ring_layout.CHECKSUM.pack(zlib.crc32(body))
        self._counters[0], self._counters[1] = self.records, self.steps

    def write_groups(self, rows: Sequence[Sequence[Any]]) -> None:
        self._write_table(ring_layout.GROUPS_OFFSET, ring_layout.GROUP, rows)

    def write_ranges(self, rows: Sequence[Sequence[Any]]) -> None:
        self._write_table(ring_layout.RANGES_OFFSET, ring_layout.RANGE, rows)

    def _write_table(self, offset: int, layout: ring_layout.Layout, rows: Sequence[Sequence[Any]]) -> None:
        body = b"".join([layout.pack(*row) for row in rows])
        head = ring_layout.TABLE_HEAD.pack(len(rows), zlib.crc32(body))
        self._memory[offset : offset + len(head) + len(body)] = head + body

    def write_live(self, memory: Tuple[int, int, int, int], collectives: Tuple[int, int]) -> None:
        body = ring_layout.LIVE.pack(time.monotonic_ns(), time.time_ns(), *memory, *collectives)
        end = ring_layout.LIVE_OFFSET + len(body) + 4
        self._memory[ring_layout.LIVE_OFFSET : end] = body + ring_layout.CHECKSUM.pack(zlib.crc32(body))

    def write_facts(self, facts: Dict[str, Any]) -> None:
        text = json.dumps(facts, sort_keys=True, allow_nan=False).encode()
        if text == self._facts:
            return
        if len(text) > ring_layout.FACTS_BYTES:
            raise ValueError("facts of {} bytes do not fit".format(len(text)))
        head = ring_layout.FACTS_HEAD.pack(len(text), zlib.crc32(text))
        self._memory[ring_layout.FACTS_OFFSET : ring_layout.FACTS_OFFSET + len(head) + len(text)] = head + text
        self._facts = text

    def command_mark(self) -> bytes:
        """Changes when the daemon has left a command."""
        return self._memory[ring_layout.COMMAND_OFFSET : ring_layout.COMMAND_OFFSET + 4]

    def read_command(self) -> bytes:
        start = ring_layout.COMMAND_BODY_OFFSET
        return self._memory[start : start + ring_layout.COMMAND.size + 4]

    def write_answer(self, answer: bytes) -> None:
        end = ring_layout.ANSWER_OFFSET + len(answer) + 4
        self._memory[ring_layout.ANSWER_OFFSET : end] = answer + ring_layout.CHECKSUM.pack(zlib.crc32(answer))

    def _write_state(self, state: int) -> None:
        self._memory[ring_layout.STATE_OFFSET : ring_layout.STATE_OFFSET + 4] = ring_layout.STATE.pack(state)

    def write_abilities(self, abilities: int) -> None:
        ring_layout.ABILITIES.pack_into(self._memory, ring_layout.ABILITIES_OFFSET, abilities)

    def mark_disabled(self) -> None:
        """Without this a probe that gave up would look like a rank that hangs."""
        self._write_state(ring_layout.STATE_DISABLED)

    def abandon(self) -> None:
        """In a forked child: this ring is the parent's. The number may have been closed and used again by the user, so
        the file is closed only if it is still ours."""
        self._counters.release()
        self._memory.close()
        with contextlib.suppress(OSError):
            if os.fstat(self._fd).st_ino == self._inode:
                os.close(self._fd)
