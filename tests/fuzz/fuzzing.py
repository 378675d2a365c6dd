"""The engine: takes an input that reached something new, changes it, and looks whether it breaks something."""

from __future__ import annotations

import contextlib
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from types import FrameType

from tests.fuzz.covering import Coverage, is_ours
from tests.fuzz.mutating import Mutator
from tests.fuzz.targets import Target

CORPUS_LIMIT = 4000
# After so many times its allowance an input is broken off.
PATIENCE = 10.0
MINIMIZE_SECONDS = 3.0


class TooSlowError(BaseException):
    """Not an Exception: the code under test must not catch it."""


@dataclass(frozen=True)
class Finding:
    kind: str  # the exception, or "TooSlow"
    place: str  # innermost line of ours
    text: str
    data: bytes

    @property
    def key(self) -> tuple[str, str]:
        return self.kind, self.place


@dataclass
class Tally:
    executions: int = 0
    seconds: float = 0.0
    places: int = 0
    corpus: int = 0
    slowest_cpu_seconds: float = 0.0
    findings: dict[tuple[str, str], Finding] = field(default_factory=dict)


class Fuzzer:
    """`coverage` None: the same inputs whatever they reach, for a short run that is the same every time."""

    def __init__(self, target: Target, seed: int, coverage: Coverage | None) -> None:
        self._target = target
        self._random = Random(f"{target.name} {seed}")
        self._mutator = target.make_mutator(Mutator(self._random, target.tokens, target.size_limit))
        self._coverage = coverage
        self.corpus: list[bytes] = []
        self.tally = Tally()
        self.told: Callable[[bytes], None] = lambda data: None  # what is about to be tried

    def plant(self, more: list[bytes]) -> None:
        """Tries the seeds, and keeps them whatever they reach."""
        for data in [*self._target.seeds, *more]:
            self._try(data)
            self.corpus.append(data)
        if not self.corpus:
            self.corpus.append(b"")

    def fuzz(self, wanted: Callable[[Tally], bool]) -> None:
        while wanted(self.tally):
            self._step()

    def _step(self) -> None:
        # The latest reached what is least known.
        newest = self._random.random() < 0.3
        start = max(0, len(self.corpus) - 32) if newest else 0
        data = self.corpus[self._random.randrange(start, len(self.corpus))]
        other = self._random.choice(self.corpus)
        changed = self._mutator.mutate(data, other)
        if self._try(changed) and len(self.corpus) < CORPUS_LIMIT:
            self.corpus.append(changed)

    def _try(self, data: bytes) -> bool:
        """Whether it reached something new."""
        before = self._coverage.places if self._coverage is not None else 0
        self.told(data)
        finding = self.check(data)
        self.tally.executions += 1
        if finding is not None and finding.key not in self.tally.findings:
            self.tally.findings[finding.key] = self._minimized(finding)
        self.tally.corpus = len(self.corpus)
        if self._coverage is None:
            return False
        self.tally.places = self._coverage.places
        return self._coverage.places > before

    def check(self, data: bytes) -> Finding | None:
        run = self._target.run
        started = time.process_time()
        finding = _outcome(data, self._target.cpu_seconds, lambda: self._covered(data))
        cpu_seconds = time.process_time() - started
        if finding is None and cpu_seconds > self._target.cpu_seconds:
            # Again without the cost of watching, and without what was done for the first time.
            started = time.process_time()
            finding = _outcome(data, self._target.cpu_seconds, lambda: run(data))
            cpu_seconds = time.process_time() - started
            if finding is None and cpu_seconds > self._target.cpu_seconds:
                text = f"{len(data)} bytes took {cpu_seconds:.2f} s of CPU; {self._target.cpu_seconds} are allowed"
                finding = Finding("TooSlow", "", text, data)
        self.tally.slowest_cpu_seconds = max(self.tally.slowest_cpu_seconds, cpu_seconds)
        return finding

    def _covered(self, data: bytes) -> None:
        if self._coverage is None:
            self._target.run(data)
        else:
            self._coverage.run(self._target.run, data)

    def _minimized(self, finding: Finding) -> Finding:
        """Shorter by whatever can be left out."""
        give_up_at = time.monotonic() + MINIMIZE_SECONDS
        best, size = finding, len(finding.data) // 2
        while size and time.monotonic() < give_up_at:
            start = 0
            while start < len(best.data) and time.monotonic() < give_up_at:
                shorter = best.data[:start] + best.data[start + size :]
                same = _outcome(shorter, self._target.cpu_seconds, lambda tried=shorter: self._target.run(tried))
                if same is not None and same.key == finding.key:
                    best = same
                else:
                    start += size
            size //= 2
        return best


def _outcome(data: bytes, cpu_seconds: float, call: Callable[[], None]) -> Finding | None:
    try:
        with _broken_off_after(cpu_seconds * PATIENCE):
            call()
    except TooSlowError as error:
        return Finding("TooSlow", _place(error), f"{len(data)} bytes took more than {cpu_seconds * PATIENCE} s", data)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what we look for
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return Finding(type(error).__name__, _place(error), text, data)
    return None


def _place(error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_ours(frame.filename)]
    own = traceback.extract_tb(error.__traceback__)[-1:]
    return next(
        (f"{frame.filename.rpartition('/rankscope/')[2]}:{frame.lineno}" for frame in reversed(frames)), ""
    ) or (f"{own[0].name}:{own[0].lineno}" if own else "")


@contextlib.contextmanager
def _broken_off_after(cpu_seconds: float) -> Iterator[None]:
    def give_up(number: int, frame: FrameType | None) -> None:
        raise TooSlowError

    before = signal.signal(signal.SIGVTALRM, give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
