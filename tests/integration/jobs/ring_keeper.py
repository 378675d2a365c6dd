"""A rank without torch that keeps a ring, honestly or not: `ring_keeper.py MODE`.

Looks like a trainer to the daemon because it maps a file called libtorch_cpu.so. Steps until its stdin is closed, then
ends with 0, whatever was done to it from outside meanwhile.
"""

import fcntl
import mmap
import os
import random
import select
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from rankscope.probe import ring_layout
from rankscope.probe.ring import Ring

STEP_SECONDS = 0.02
SEALS = ring_layout.F_SEAL_SHRINK | ring_layout.F_SEAL_GROW


def look_like_torch() -> mmap.mmap:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "libtorch_cpu.so"
        path.write_bytes(bytes(4096))
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ)


def forged(size: int, content: bytes, seals: int) -> int:
    descriptor = os.memfd_create(ring_layout.RING_NAME, os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    os.pwrite(descriptor, content, 0)
    fcntl.fcntl(descriptor, ring_layout.F_ADD_SEALS, seals)
    return descriptor


class Trick(Protocol):
    def step(self) -> None: ...


class Keeper(Trick):
    """An honest probe's ring that steps at a steady pace."""

    def __init__(self) -> None:
        self.ring = Ring()
        self.memory = self.ring._memory

    def step(self) -> None:
        seconds = {
            "input_seconds": 0.0,
            "blocking_seconds": 0.001,
            "optimizer_seconds": 0.001,
            "checkpoint_seconds": 0.0,
        }
        self.ring.append(time.monotonic_ns(), int(STEP_SECONDS * 1e9), seconds, 0, 1)
        self.ring.write_live((-1, -1, -1, -1), (-1, -1))


def header(version: int) -> bytes:
    sizes = (ring_layout.HEADER_BYTES, ring_layout.RECORD_BYTES, ring_layout.CAPACITY)
    fixed = ring_layout.FIXED.pack(ring_layout.MAGIC, version, *sizes, os.getpid(), 1)
    return fixed + ring_layout.CHECKSUM.pack(zlib.crc32(fixed))


class FutureVersion(Keeper):
    def __init__(self) -> None:
        super().__init__()
        future = header(ring_layout.VERSION + 1)
        self.memory[: len(future)] = future


class EndlessCounters(Keeper):
    def step(self) -> None:
        super().step()
        ring_layout.COUNTERS.pack_into(self.memory, ring_layout.COUNTERS_OFFSET, 2**60, 2**60)


class Scribbler(Keeper):
    """Overwrites the ring at random while it is being read; every checksum is wrong sooner or later."""

    def step(self) -> None:
        super().step()
        for _ in range(200):
            place = random.randrange(ring_layout.RING_BYTES - 64)
            self.memory[place : place + 64] = random.randbytes(64)


class Garbage(Trick):
    """Rightly sealed and of the right size, and nothing in it means anything."""

    def __init__(self) -> None:
        forged(ring_layout.RING_BYTES, random.Random(0).randbytes(ring_layout.RING_BYTES), SEALS)

    def step(self) -> None: ...


class Enormous(Garbage):
    def __init__(self) -> None:
        forged(1 << 40, header(ring_layout.VERSION), SEALS)


class Shrinking(Trick):
    """A reader that maps this file would be killed by SIGBUS."""

    def __init__(self) -> None:
        self.descriptor = forged(ring_layout.RING_BYTES, header(ring_layout.VERSION), 0)

    def step(self) -> None:
        for size in (0, ring_layout.RING_BYTES):
            os.ftruncate(self.descriptor, size)


MODES: dict[str, Callable[[], Trick]] = {
    "honest": Keeper,
    "garbage": Garbage,
    "future-version": FutureVersion,
    "endless-counters": EndlessCounters,
    "scribbling": Scribbler,
    "enormous": Enormous,
    "shrinking": Shrinking,
}


def main() -> None:
    mapping = look_like_torch()
    keeper = MODES[sys.argv[1]]()
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], STEP_SECONDS)[0]:
        keeper.step()
    mapping.close()


if __name__ == "__main__":
    main()
