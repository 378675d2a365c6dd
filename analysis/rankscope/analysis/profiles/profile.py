"""The columns of a profile: stacks of interned frames, and how often each rank was seen in them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from rankscope.analysis.profiles.frames import Frame, Stack
from rankscope.analysis.stats.robust import Ints, number_groups

Key = TypeVar("Key")


class SampledStack(NamedTuple):
    stack: Stack
    samples: int
    nanos: int  # of wall time that the samples stand for
    rank: int = 0
    thread: str = ""
    phase: str = ""


class FrameTotal(NamedTuple):
    frame: Frame
    leaf_samples: int
    samples: int  # in which it is on the stack, once however deep the recursion


@dataclass(frozen=True, eq=False)
class Profile:
    frames: tuple[Frame, ...]
    threads: tuple[str, ...]
    phases: tuple[str, ...]
    # One number per frame of a stack, innermost first, stacks one after another; and where each stack ends.
    stack_frames: Ints
    stack_ends: Ints
    # One row per stack, rank, thread and phase. `thread` and `phase` are numbers of the names above.
    stack: Ints
    rank: Ints
    thread: Ints
    phase: Ints
    samples: Ints
    nanos: Ints

    @classmethod
    def of(cls, sampled: Iterable[SampledStack]) -> Profile:
        frames, stacks = _Numbers[Frame](), _Numbers[Stack]()
        threads, phases = _Numbers[str](), _Numbers[str]()
        rows = [
            (stacks[one.stack], one.rank, threads[one.thread], phases[one.phase], one.samples, one.nanos)
            for one in sampled
        ]
        numbers = [[frames[frame] for frame in stack] for stack in stacks]
        return profile_of_columns(
            tuple(frames),
            tuple(threads),
            tuple(phases),
            np.fromiter((number for stack in numbers for number in stack), dtype=np.int64),
            np.cumsum([len(stack) for stack in numbers], dtype=np.int64),
            np.array(rows, dtype=np.int64).reshape(len(rows), 6).T,
        )

    @property
    def samples_total(self) -> int:
        return int(self.samples.sum())

    @property
    def nanos_total(self) -> int:
        return int(self.nanos.sum())

    def __iter__(self) -> Iterator[SampledStack]:
        """One per row, in the order of the rows."""
        stacks = self.stacks()
        columns = (self.stack, self.samples, self.nanos, self.rank, self.thread, self.phase)
        for stack, samples, nanos, rank, thread, phase in zip(*(column.tolist() for column in columns), strict=True):
            frames = tuple(map(self.frames.__getitem__, stacks[stack]))
            yield SampledStack(frames, samples, nanos, rank, self.threads[thread], self.phases[phase])

    def stacks(self) -> list[list[int]]:
        """The numbers of the frames of each stack, innermost first."""
        numbers, ends = self.stack_frames.tolist(), self.stack_ends.tolist()
        return [numbers[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def filter(
        self,
        ranks: Collection[int] | None = None,
        threads: Collection[str] | None = None,
        phases: Collection[str] | None = None,
    ) -> Profile:
        """The rows of these ranks, threads and phases; None: of all."""
        kept = np.ones(len(self.stack), dtype=bool)
        if ranks is not None:
            kept &= np.isin(self.rank, np.fromiter(ranks, dtype=np.int64))
        if threads is not None:
            kept &= np.array([name in threads for name in self.threads], dtype=bool)[self.thread]
        if phases is not None:
            kept &= np.array([name in phases for name in self.phases], dtype=bool)[self.phase]
        if kept.all():
            return self
        names = ("stack", "rank", "thread", "phase", "samples", "nanos")
        return replace(self, **{name: getattr(self, name)[kept] for name in names})

    def frame_samples(self, weights: Ints | None = None) -> Ints:
        """Per frame, the samples in which it is on the stack. `weights`: per row, instead of its samples."""
        stack, frame = self._stacks_by_frame
        per_stack = np.bincount(self.stack, self.samples if weights is None else weights, len(self.stack_ends))
        return _integers(np.bincount(frame, per_stack[stack], len(self.frames)))

    def leaf_samples(self) -> Ints:
        """Per frame, the samples in which it is the innermost."""
        lengths = np.diff(self.stack_ends, prepend=0)
        starts = self.stack_ends - lengths
        rows = lengths[self.stack] > 0
        leaf = self.stack_frames[starts[self.stack[rows]]]
        return _integers(np.bincount(leaf, self.samples[rows], len(self.frames)))

    def top(self, limit: int = 50) -> list[FrameTotal]:
        """The frames with most samples of their own."""
        total, leaf = self.frame_samples(), self.leaf_samples()
        order = np.lexsort((-total, -leaf))[:limit].tolist()
        return [FrameTotal(self.frames[n], int(leaf[n]), int(total[n])) for n in order if total[n]]

    @cached_property
    def _stacks_by_frame(self) -> tuple[Ints, Ints]:
        """Pairs of a stack and a frame in it, each once."""
        lengths = np.diff(self.stack_ends, prepend=0)
        stack = np.repeat(np.arange(len(lengths)), lengths)
        pairs = np.unique(stack * max(len(self.frames), 1) + self.stack_frames)
        return np.divmod(pairs, max(len(self.frames), 1))


class _Numbers(dict[Key, int]):
    """Numbers from 0 for whatever is asked for."""

    def __missing__(self, key: Key) -> int:
        self[key] = number = len(self)
        return number


def profile_of_columns(
    frames: tuple[Frame, ...],
    threads: tuple[str, ...],
    phases: tuple[str, ...],
    stack_frames: Ints,
    stack_ends: Ints,
    rows: Ints,
) -> Profile:
    """`rows`: stack, rank, thread, phase, samples and nanos. Rows that differ in the last two only are added up."""
    group, groups = number_groups(rows[0], rows[1], rows[2], rows[3])
    first = np.zeros(groups, dtype=np.int64)
    first[group[::-1]] = np.arange(len(group))[::-1]
    samples, nanos = (_integers(np.bincount(group, column, groups)) for column in rows[4:])
    stack, rank, thread, phase = (column[first] for column in rows[:4])
    return Profile(frames, threads, phases, stack_frames, stack_ends, stack, rank, thread, phase, samples, nanos)


def _integers(sums: npt.NDArray[Any]) -> Ints:
    whole: Ints = np.rint(sums).astype(np.int64)
    return whole


def merge(profiles: Sequence[Profile]) -> Profile:
    """The sum of several profiles."""
    if len(profiles) == 1:
        return profiles[0]
    frames, stacks = _Numbers[Frame](), _Numbers[bytes]()
    threads, phases = _Numbers[str](), _Numbers[str]()
    rows = []
    for profile in profiles:
        frame_numbers = np.array([frames[frame] for frame in profile.frames], dtype=np.int64)
        thread_numbers = np.array([threads[name] for name in profile.threads], dtype=np.int64)
        phase_numbers = np.array([phases[name] for name in profile.phases], dtype=np.int64)
        content = frame_numbers[profile.stack_frames].tobytes()
        ends = (8 * profile.stack_ends).tolist()
        stack_numbers = np.array(
            [stacks[content[start:end]] for start, end in zip([0, *ends], ends, strict=False)], dtype=np.int64
        )
        rows.append(
            np.stack(
                [
                    stack_numbers[profile.stack],
                    profile.rank,
                    thread_numbers[profile.thread],
                    phase_numbers[profile.phase],
                    profile.samples,
                    profile.nanos,
                ]
            )
        )
    return profile_of_columns(
        tuple(frames),
        tuple(threads),
        tuple(phases),
        np.frombuffer(b"".join(stacks), dtype=np.int64),
        np.cumsum([len(content) // 8 for content in stacks], dtype=np.int64),
        np.concatenate(rows, axis=1) if rows else np.zeros((6, 0), dtype=np.int64),
    )
