"""Which collectives end a step, in a loop that marks none: the period of the sequence of a rank's operations. Pure.

Only collectives in which all ranks of the job meet count: their sequence is the same on every rank, so all ranks find
the same steps without asking each other. A step ends with the operation that moves most bytes of those that come once a
step. Where all operations are alike, a pause of the device before each burst of them marks the step. What may be one
step or several is no step: it is better not to know a step than to report another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]

MAX_OPERATIONS = 1 << 13  # that are compared, the newest
MAX_SYMBOLS = 64
MIN_STEPS = 8
# Steps of this share have the same operations. The others have more, which are light: logging, a loss now and then.
USUAL_SHARE = 0.75
LIGHT_RATIO = 1 / 16
# An evaluation. More than one may be the true end of steps whose parts repeat, as with accumulated gradients.
MAX_ODD_STEPS = 1
# What has not come for so long, and for so many times as long as ever before, belongs to a loop that has ended.
MIN_ABSENT_NS = 10_000_000_000
ABSENT_RATIO = 4
# From this share on, operations that are alike may be bursts; from that on, with something else only now and then.
MIN_ALIKE_SHARE, ALIKE_SHARE = 0.5, 0.9
# A pause is so many times as long as the usual gap between two operations.
PAUSE_RATIO = 4.0
MIN_PAUSE_NS = 20_000
MIN_BURST = 4
# Of the autocorrelation of gaps; noise has fewer.
ERRORS_NEEDED = 6.0
MIN_VARIANCE = 1e-6
# The device pauses after an operation if it does so in all but this share of the bursts: not in every second one.
SHORT_SHARE = 0.25
# A single operation is a step if the device did other work before it for as long, nearly always.
MIN_ALONE_NS = 1_000_000
ALONE_SHARE = 0.9


@dataclass(frozen=True)
class Meetings:
    """Collectives in which all ranks of the job meet, in the order in which the host issued them."""

    communicator: Ints  # low half of its hash
    function: Ints
    bytes: Ints
    sequence: Ints  # of the function, in its communicator
    start_ns: Ints
    stop_ns: Ints
    others: Ints  # operations of the rank that are none of these, issued before

    def __len__(self) -> int:
        return len(self.sequence)

    def take(self, rows: object) -> Meetings:
        return Meetings(*(column[rows] for column in vars(self).values()))


@dataclass(frozen=True)
class Period:
    """`ends` are the rows of the operations that end steps; the first of them begins the first step. `numbers` are
    those of the steps that they end, the same on all ranks. `shape` is equal for as long as the loop is the same."""

    ends: Ints
    numbers: Ints
    shape: tuple[int, ...]  # communicator, function and bytes of the operation that ends a step; operations of a step


def find_period(meetings: Meetings) -> Period | None:
    first = max(0, len(meetings) - MAX_OPERATIONS)
    first += _unbroken_from(meetings.take(slice(first, None)))
    first += _same_loop_from(meetings.take(slice(first, None)))
    newest = meetings.take(slice(first, None))
    if len(newest) <= MIN_STEPS:
        return None
    symbol = _symbols(newest)
    counts = np.bincount(symbol)
    regular = np.flatnonzero(counts > MIN_STEPS)
    if not len(regular):
        return None
    rows = _end_rows(newest, symbol, regular) if len(regular) > 1 else None
    is_alike = symbol == counts.argmax()
    if np.mean(is_alike) >= MIN_ALIKE_SHARE:
        bursts = _end_rows_of_bursts(newest, np.flatnonzero(is_alike), is_alone=len(regular) == 1)
        if bursts is not None and not _are_bursts_of(bursts, rows):
            # Other operations are between the bursts: either these are no steps, or those are only now and then.
            is_light = newest.bytes[~is_alike].sum() <= LIGHT_RATIO * newest.bytes[is_alike].sum()
            rows = bursts if is_light and np.mean(is_alike) >= ALIKE_SHARE else None
    if rows is None:
        return None
    last = int(rows[-1])
    sequence = newest.sequence[rows]
    per_step = int(_commonest(np.diff(sequence)))
    shape = (newest.communicator[last], newest.function[last], newest.bytes[last], _commonest(np.diff(rows)))
    return Period(rows + first, sequence // max(per_step, 1) + 1, tuple(int(part) for part in shape))


def _unbroken_from(meetings: Meetings) -> int:
    """The first row from which on no operation is missing."""
    _, stream = np.unique(meetings.communicator << 8 | meetings.function, return_inverse=True)
    order = np.argsort(stream, kind="stable")
    is_next = np.diff(meetings.sequence[order]) == 1
    is_broken = (np.diff(stream[order]) == 0) & ~is_next
    return int(order[1:][is_broken].max(initial=0))


def _same_loop_from(meetings: Meetings) -> int:
    """The first row after operations that have come no more for long: those of a loop that has ended."""
    if not len(meetings):
        return 0
    symbol = _symbols(meetings)
    order = np.argsort(symbol, kind="stable")
    ended = np.maximum.accumulate(meetings.stop_ns)
    is_last = np.diff(symbol[order], append=-1) != 0
    since_before = np.where(np.diff(symbol[order], prepend=-1) != 0, 0, np.diff(ended[order], prepend=0))
    firsts = np.flatnonzero(np.append(True, is_last[:-1]))
    longest = np.maximum.reduceat(since_before, firsts)
    last = order[is_last]
    absent = ended[-1] - ended[last]
    is_gone = absent > np.maximum(MIN_ABSENT_NS, ABSENT_RATIO * longest)
    return int(last[is_gone].max(initial=-1)) + 1


def _symbols(meetings: Meetings) -> Ints:
    """A number for each operation, equal for operations that look alike."""
    _, moved = np.unique(meetings.bytes, return_inverse=True)
    _, where = np.unique(meetings.communicator << 8 | meetings.function, return_inverse=True)
    symbol: Ints = np.unique(where * (len(moved) + 1) + moved, return_inverse=True)[1].astype(np.int64)
    return symbol


def _commonest(values: npt.NDArray[np.int64] | npt.NDArray[np.uint64]) -> int:
    found, counts = np.unique(values, return_counts=True)
    return int(found[counts.argmax()])


def _end_rows(meetings: Meetings, symbol: Ints, regular: Ints) -> Ints | None:
    """By operations that come once a step. None if there are none, or if they come at different intervals."""
    # Of the operations between two rows, in any order: threads of a host may take turns.
    weights = np.random.default_rng(0).integers(1 << 63, size=int(symbol.max()) + 1, dtype=np.uint64)
    content, moved = np.cumsum(weights[symbol]), np.cumsum(meetings.bytes.astype(np.float64))
    rows_of = {int(number): np.flatnonzero(symbol == number) for number in regular}
    heaviest = sorted(rows_of.values(), key=lambda rows: _weight(meetings, int(rows[0])))[-MAX_SYMBOLS:]
    best: Ints | None = None
    contents: set[int] = set()
    for rows in heaviest:
        kept = _steps_between(rows, content, moved)
        if kept is not None:
            best = kept
            contents.add(_commonest(np.diff(content[kept])))
    if best is None or len(contents) > 1:
        return None
    # Ranks whose records begin later know fewer steps. Only the heaviest operation ends a step on any of them.
    at = int((np.diff(content[best]) == np.uint64(contents.pop())).argmax())
    _, first, times = np.unique(symbol[best[at] + 1 : best[at + 1] + 1], return_index=True, return_counts=True)
    once = (first[times == 1] + best[at] + 1).tolist()
    is_heaviest = _weight(meetings, int(best[0])) == max(_weight(meetings, row) for row in once)
    is_light = meetings.bytes[best[0]] <= LIGHT_RATIO * (moved[best[at + 1]] - moved[best[at]])
    # What repeats before a light operation may be steps, after some of which the loop logs.
    within = meetings.take(slice(best[at], best[at + 1] + 1))
    is_log = is_light and (_repeats(symbol[best[at] + 1 : best[at + 1]]) or _pauses_often(within))
    return best if is_heaviest and not is_log else None


def _repeats(symbols: Ints) -> bool:
    """Whether they are the same few several times over, and not one alone."""
    parts = (length for length in range(2, len(symbols) // 2 + 1) if len(symbols) % length == 0)
    return bool(np.ptp(symbols)) and any((symbols[length:] == symbols[:-length]).all() for length in parts)


def _pauses_often(meetings: Meetings) -> bool:
    """Whether the device pauses for about as long several times, as between steps of the same operation."""
    gap = np.maximum(meetings.start_ns[1:] - meetings.stop_ns[:-1], 0)
    usual = max(float(np.quantile(gap, SHORT_SHARE)), float(MIN_PAUSE_NS))
    return bool(np.count_nonzero(gap > max(PAUSE_RATIO * usual, gap.max() / 2)) > 1)


def _weight(meetings: Meetings, row: int) -> tuple[int, int, int]:
    return int(meetings.bytes[row]), int(meetings.function[row]), int(meetings.communicator[row])


def _steps_between(rows: Ints, content: npt.NDArray[np.uint64], moved: npt.NDArray[np.float64]) -> Ints | None:
    """The rows, where what is between them is nearly always the same; from the last odd step on."""
    usual = _commonest(np.diff(content[rows]))
    is_usual = np.diff(content[rows]) == np.uint64(usual)
    at = int(is_usual.argmax())
    count, weight = int(rows[at + 1] - rows[at]), float(moved[rows[at + 1]] - moved[rows[at]])
    if count == 1:
        return None
    # The same operation a second time, and little else, ends no step.
    is_rest = (np.diff(rows) < count) & (np.diff(moved[rows]) <= LIGHT_RATIO * weight)
    rows = rows[np.append(True, ~is_rest)]
    if len(rows) <= MIN_STEPS:
        return None
    is_usual = np.diff(content[rows]) == np.uint64(usual)
    more, more_bytes = np.diff(rows) - count, np.diff(moved[rows]) - weight
    is_light = (more > 0) & (more <= count) & (more_bytes >= 0) & (more_bytes <= LIGHT_RATIO * weight)
    is_odd = ~(is_usual | is_light)
    if is_usual.mean() < USUAL_SHARE or np.count_nonzero(is_odd) > MAX_ODD_STEPS:
        return None
    rows = rows[int(np.flatnonzero(is_odd).max(initial=-1)) + 1 :]
    return rows if len(rows) > MIN_STEPS else None


def _end_rows_of_bursts(meetings: Meetings, alike: Ints, is_alone: bool) -> Ints | None:
    """By pauses of the device between operations that are alike; each operation, if all pauses are long and there are
    no others."""
    start, stop = meetings.start_ns[alike], np.maximum.accumulate(meetings.stop_ns[alike])
    gap = np.maximum(start[1:] - stop[:-1], 0)
    if len(gap) < MIN_STEPS:
        return None
    longest = _repeats_after(gap)
    pauses = np.zeros(0, dtype=np.int64) if longest is None else _pauses(gap, longest)
    if (
        longest is not None
        and len(pauses)
        and (np.diff(pauses, append=pauses[0] + longest) == longest / len(pauses)).all()
    ):
        ends: Ints = alike[np.arange(pauses[0], len(alike), longest // len(pauses))]
        return ends if longest // len(pauses) >= MIN_BURST else None
    others = np.diff(meetings.others[alike])
    is_same = np.mean(others == _commonest(others)) >= USUAL_SHARE
    is_paused = np.mean(gap >= MIN_ALONE_NS) >= ALONE_SHARE
    return alike if is_alone and longest is None and is_same and is_paused else None


def _repeats_after(gap: Ints) -> int | None:
    """After how many operations gaps are alike again, by the peak of their autocorrelation: a period or a few."""
    size = np.log(gap + float(MIN_PAUSE_NS))
    size -= size.mean()
    variance, most = float(size.var()), len(gap) // MIN_STEPS
    if most < MIN_BURST or variance < MIN_VARIANCE:
        return None
    spectrum = np.fft.rfft(size, 1 << (2 * len(size) - 1).bit_length())
    likeness = np.fft.irfft(spectrum * spectrum.conj())[: most + 1] / (len(size) - np.arange(most + 1)) / variance
    peak = MIN_BURST + int(likeness[MIN_BURST:].argmax())
    return peak if likeness[peak] >= ERRORS_NEEDED / np.sqrt(len(size)) else None


def _pauses(gap: Ints, burst: int) -> Ints:
    """The operations of a burst after which the device pauses."""
    bursts = len(gap) // burst
    short = int(SHORT_SHARE * bursts)
    least = np.partition(gap[: bursts * burst].reshape(bursts, burst), short, axis=0)[short]
    within = float(np.quantile(gap, SHORT_SHARE))  # half of the gaps may be pauses
    return np.flatnonzero(least > max(PAUSE_RATIO * within, within + MIN_PAUSE_NS))


def _are_bursts_of(bursts: Ints, repeated: Ints | None) -> bool:
    """Whether the steps by content have one burst each."""
    return repeated is not None and abs(len(bursts) - len(repeated)) <= 1 + LIGHT_RATIO * len(repeated)
