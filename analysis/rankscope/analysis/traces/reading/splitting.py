"""Cuts the traceEvents array of a text that comes in blocks into batches of whole events, however it is formatted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from rankscope.analysis.traces.reading.decoding import (
    DECODE_ERRORS,
    Batch,
    decode,
    decode_pieces,
    next_event,
    note_unreadable,
)
from rankscope.analysis.traces.reading.refusing import Repairs, TraceError
from rankscope.analysis.traces.reading.scanning import Layout, lay_out

# Large enough that a decoder's start-up does not count, small enough that its records stay in the cache.
PIECE_BYTES = 2 << 20
# One event never takes so much; without a limit a stray quote would swallow the file.
EVENT_LIMIT_BYTES = 32 << 20
# Behind a broken place there may be another at once: looking at a whole piece again for each would take hours.
WARY_BYTES = 16 << 10

_LIKELY_CUT = re.compile(rb"\}\s*,\s*(?=\{)")
_LIKELY_END = re.compile(rb"\}\s*\]")
_CUT_SEARCH_BYTES = 16 << 10


@dataclass
class Text:
    """The part of a text that is looked at; what was read is let go."""

    blocks: Iterator[bytes]
    repairs: Repairs
    held: bytearray = field(default_factory=bytearray)
    offset: int = 0  # of held[0] in the whole text
    ended: bool = False

    def hold(self, count: int) -> None:
        """At least so many bytes, if there are so many."""
        while len(self.held) < count and not self.ended:
            block = next(self.blocks, None)
            if block is None:
                self.ended = True
            else:
                self.held += block

    def drop(self, count: int) -> None:
        del self.held[:count]
        self.offset += count


@dataclass
class Ending:
    closed: bool = False
    cut: bool = False  # the text ended before the array did


def batches(text: Text, ending: Ending) -> Iterator[Batch]:
    """All events from where `text` stands, just behind the opening bracket, to the closing one. Afterwards `ending`
    tells how the array ended; the text stands behind it."""
    reach = PIECE_BYTES
    while not (ending.closed or ending.cut):
        text.hold(reach)
        is_wary = reach < PIECE_BYTES
        batch = None if is_wary else _decode_likely(text, ending)
        if batch is not None:
            reach = PIECE_BYTES
            yield batch
            continue
        held = bytes(text.held[:reach] if is_wary else text.held)
        is_all = text.ended and len(held) == len(text.held)
        layout = lay_out(held)
        endless = layout.closing is None and not len(layout.commas) and not is_all
        if endless and len(held) < EVENT_LIMIT_BYTES:
            reach = 2 * len(held)
            continue
        if endless:
            text.drop(_skip_endless(text, held))
            reach = WARY_BYTES
            continue
        if layout.closing is not None:
            found, following = _finish_closed(text, held, layout, ending)
        elif is_all:
            found, following = _finish_cut(text, held, layout, ending)
        else:
            starts, ends = layout.pieces(len(held))
            found, following = decode_pieces(held, starts[:-1], ends[:-1], text.repairs, offset=text.offset)
            text.drop(starts[-1] if following is None else following)
        reach = min(2 * reach, PIECE_BYTES) if following is None else WARY_BYTES
        yield from found


def _decode_likely(text: Text, ending: Ending) -> Batch | None:
    """Cuts where an event, or the array, seems to end, and lets the decoder prove it: much cheaper than counting
    brackets. None where that was no place to cut, or where something is broken."""
    pattern = _LIKELY_END if text.ended else _LIKELY_CUT
    cuts = list(pattern.finditer(text.held, max(0, len(text.held) - _CUT_SEARCH_BYTES)))
    if not cuts:
        return None
    # What follows the array holds such brackets too, events seldom do.
    cut = cuts[0] if text.ended else cuts[-1]
    try:
        with memoryview(text.held) as view, view[: cut.start() + 1] as elements:
            batch = decode(elements)
    except DECODE_ERRORS:
        return None
    text.drop(cut.end())
    ending.closed = text.ended
    return batch


def _finish_closed(text: Text, held: bytes, layout: Layout, ending: Ending) -> tuple[list[Batch], int | None]:
    starts, ends = layout.pieces(len(held))
    if not held[starts[-1] : ends[-1]].strip():
        if len(starts) > 1:
            text.repairs.note("comma before the end of traceEvents taken away", byte=text.offset + ends[-2])
        starts, ends = starts[:-1], ends[:-1]
    found, following = decode_pieces(held, starts, ends, text.repairs, offset=text.offset)
    ending.closed = following is None
    text.drop(int(layout.closing or 0) + 1 if following is None else following)
    return found, following


def _finish_cut(text: Text, held: bytes, layout: Layout, ending: Ending) -> tuple[list[Batch], int | None]:
    starts, ends = layout.pieces(len(held))
    found, following = decode_pieces(held, starts[:-1], ends[:-1], text.repairs, offset=text.offset)
    if following is None:
        # Either half an event, or whole ones behind a stray quote.
        last = held[starts[-1] :]
        try:
            found.append(decode(last))
        except DECODE_ERRORS:
            following = next_event(held, starts[-1], len(held))
            if following is not None:
                note_unreadable(text.repairs, "a quote is missing or one too many", byte=text.offset + starts[-1])
    ending.cut = following is None
    text.drop(len(held) if following is None else following)
    return found, following


def _skip_endless(text: Text, held: bytes) -> int:
    reason = f"it is longer than {EVENT_LIMIT_BYTES} bytes, or a quote is missing"
    following = next_event(held, 0, len(held))
    if following is None:
        raise TraceError(f"an event has no end: {reason}", byte=text.offset)
    note_unreadable(text.repairs, reason, byte=text.offset)
    return following
