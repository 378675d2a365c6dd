"""From the stacks of a recording to the few numbers and places that travel on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from rankscope.daemon.phases import is_user_code, phase_of
from rankscope.daemon.pyspy_output import Stack
from rankscope.daemon.samples import Frame, FrameCount, Span, StackSample

FRAMES_KEPT: Final = 64
# Places in the program's own source come first: they are what its author can change. A few places in libraries stay in
# any case, for they tell what the program waits for.
LIBRARY_FRAMES_KEPT: Final = 16


def summarise(stacks: Mapping[Stack, int], errors: int, span: Span) -> StackSample:
    phase_counts: Counter[str] = Counter()
    inclusive: Counter[Frame] = Counter()
    leaf: Counter[Frame] = Counter()
    phases_of_frame: dict[Frame, Counter[str]] = {}
    for stack, count in stacks.items():
        phase = phase_of(stack)
        phase_counts[phase] += count
        for frame in set(stack):  # once, however deep the recursion
            inclusive[frame] += count
            phases_of_frame.setdefault(frame, Counter())[phase] += count
        if stack:
            leaf[stack[0]] += count
    counts = [
        FrameCount(frame, total, leaf[frame], phases_of_frame[frame].most_common(1)[0][0])
        for frame, total in inclusive.items()
    ]
    return StackSample(
        span=span,
        samples=sum(stacks.values()),
        errors=errors,
        phase_counts=dict(phase_counts),
        frames=_largest(counts),
        distinct_stacks=len(stacks),
    )


def _largest(counts: list[FrameCount]) -> tuple[FrameCount, ...]:
    if len(counts) > FRAMES_KEPT:
        own = sorted((count for count in counts if is_user_code(count.frame)), key=_weight)
        library = sorted((count for count in counts if not is_user_code(count.frame)), key=_leaf_weight)
        own_kept = max(FRAMES_KEPT - LIBRARY_FRAMES_KEPT, FRAMES_KEPT - len(library))
        counts = [*own[:own_kept], *library[: FRAMES_KEPT - min(len(own), own_kept)]]
    return tuple(sorted(counts, key=_weight))


def _weight(count: FrameCount) -> tuple[int, int, str, int]:
    return (-count.inclusive, -count.leaf, count.frame.file, count.frame.line)


def _leaf_weight(count: FrameCount) -> tuple[int, int, str, int]:
    return (-count.leaf, -count.inclusive, count.frame.file, count.frame.line)
