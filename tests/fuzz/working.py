"""One process that fuzzes one target for a while: `python -m tests.fuzz.working TARGET FOLDER SECONDS SEED`.

What it is about to try lies in a file that outlives it, so that an input that kills or hangs it is not lost."""

from __future__ import annotations

import hashlib
import json
import mmap
import resource
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.fuzz.covering import start_coverage
from tests.fuzz.fuzzing import Finding, Fuzzer, Tally
from tests.fuzz.targets import load

MEMORY_BYTES = 3 << 30  # beyond what it has at the start
TELL_SECONDS = 2.0
SAVE_SECONDS = 20.0
PLANTED_LIMIT = 1500
TRIED = struct.Struct("<QI")  # how many before it, and its length
TRIED_BYTES = 8 << 20


def main(name: str, folder: Path, seconds: float, seed: int) -> None:
    started = time.monotonic()
    target = load(name)
    _limit_memory()
    coverage = start_coverage()
    fuzzer = Fuzzer(target, seed, coverage)
    fuzzer.told = _tried_in(folder / f"{seed}.tried")
    corpus = folder / "corpus"
    corpus.mkdir(exist_ok=True)
    resident = _resident_bytes()
    fuzzer.plant([path.read_bytes() for path in sorted(corpus.iterdir())[:PLANTED_LIMIT]])
    planted = len(fuzzer.corpus)
    told_at = saved_at = time.monotonic()

    def wanted(tally: Tally) -> bool:
        nonlocal told_at, saved_at, planted
        if tally.executions % 16 and not tally.slowest_cpu_seconds > TELL_SECONDS:
            return True
        now = time.monotonic()
        tally.seconds = now - started
        if now - told_at > TELL_SECONDS:
            told_at = now
            _leave(folder, seed, tally, _resident_bytes() - resident)
        if now - saved_at > SAVE_SECONDS:
            saved_at = now
            planted = _save(corpus, fuzzer.corpus, planted)
        return tally.seconds < seconds

    fuzzer.fuzz(wanted)
    _save(corpus, fuzzer.corpus, planted)
    fuzzer.tally.seconds = time.monotonic() - started
    _leave(folder, seed, fuzzer.tally, _resident_bytes() - resident, ended=True)


def keep_finding(folder: Path, finding: Finding) -> Path:
    """The input, and beside it what went wrong."""
    digest = hashlib.sha256(repr(finding.key).encode()).hexdigest()[:8]
    path = folder / "findings" / f"{finding.kind}-{digest}"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.write_bytes(finding.data)
        path.with_suffix(".txt").write_text(f"{finding.kind} at {finding.place}\n\n{finding.text}\n", errors="replace")
    return path


def _leave(folder: Path, seed: int, tally: Tally, grown_bytes: int, *, ended: bool = False) -> None:
    for finding in tally.findings.values():
        keep_finding(folder, finding)
    told = {
        "seconds": round(tally.seconds, 1),
        "executions": tally.executions,
        "places": tally.places,
        "corpus": tally.corpus,
        "slowest_cpu_seconds": round(tally.slowest_cpu_seconds, 4),
        "grown_mebibytes": round(grown_bytes / 2**20, 1),
        "findings": sorted(f"{kind} at {place}" for kind, place in tally.findings),
        "ended": ended,
    }
    part = folder / f"{seed}.part"
    part.write_text(json.dumps(told))
    part.replace(folder / f"{seed}.json")


def _save(folder: Path, corpus: list[bytes], known: int) -> int:
    for data in corpus[known:]:
        (folder / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    return len(corpus)


def _tried_in(path: Path) -> Callable[[bytes], None]:
    with path.open("w+b") as file:
        file.truncate(TRIED_BYTES)
        memory = mmap.mmap(file.fileno(), TRIED_BYTES)
    count = 0

    def told(data: bytes) -> None:
        nonlocal count
        kept = data[: TRIED_BYTES - TRIED.size]
        memory[TRIED.size : TRIED.size + len(kept)] = kept
        TRIED.pack_into(memory, 0, count, len(kept))
        count += 1

    return told


def last_tried(path: Path) -> tuple[int, bytes]:
    with path.open("rb") as file:
        count, length = TRIED.unpack(file.read(TRIED.size))
        return count, file.read(length)


def _limit_memory() -> None:
    """An input that wants gigabytes gets a MemoryError, which is a finding."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
