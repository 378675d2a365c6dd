"""Streams the events of a trace file: decompresses it block by block within a size limit, and splits the traceEvents
array into batches of whole events, however it is formatted."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rankscope.analysis.traces.reader.events import (
    DECODE_ERRORS,
    Batch,
    KeyScanner,
    Layout,
    decode,
    decode_pieces,
    lay_out,
    next_event,
    note_unreadable,
)
from rankscope.analysis.traces.trace import Repairs, TraceError

BLOCK_BYTES = 1 << 20
MAX_TEXT_BYTES = 16 << 30
_GZIP = b"\x1f\x8b"
_GZIP_WINDOW = 31  # zlib: expect a gzip header and verify the checksum
_OTHER_KINDS = (
    (b"PK\x03\x04", "a zip archive"),
    (b"\x28\xb5\x2f\xfd", "zstandard-compressed"),
    (b"BZh", "bzip2-compressed"),
    (b"\xfd7zXZ", "xz-compressed"),
    (b"PAR1", "a parquet file"),
    (b"\xff\xfe", "UTF-16 text"),
    (b"\xfe\xff", "UTF-16 text"),
    (b"SQLite format 3", "an SQLite database (an Nsight export?)"),
)
# Large enough to amortize the decoder's start-up, small enough for its records to stay in the cache.
PIECE_BYTES = 2 << 20
# More than any event takes; without a limit a stray quote would swallow the file.
MAX_EVENT_BYTES = 32 << 20
# After a damaged position there may be another one soon: scanning a whole piece again for each would take hours.
WARY_BYTES = 16 << 10
# How often a text may be searched for the end of a damaged event, and how much in any case.
_SEARCHES = 8
_SEARCHED_BYTES = 16 << 20
_HEAD_BYTES = 256 << 10
# Input for zlib: it copies what follows a gzip member, which may be one of thousands.
_GZIP_BYTES = 16 << 10
_OPEN = re.compile(rb'"traceEvents"\s*(?::\s*)?\Z')
_VALUE = re.compile(rb'"traceEvents"\s*:\s*(\S)')
_LIKELY_CUT = re.compile(rb"\}\s*,\s*(?=\{)")
_LIKELY_END = re.compile(rb"\}\s*\]")
_CUT_SEARCH_BYTES = 16 << 10


def blocks_of(data: bytes | bytearray | memoryview) -> Iterator[memoryview]:
    view = memoryview(data).cast("B")
    for start in range(0, len(view), BLOCK_BYTES):
        yield view[start : start + BLOCK_BYTES]


def inflate(blocks: Iterable[bytes | memoryview], *, limit_bytes: int = MAX_TEXT_BYTES) -> Iterator[bytes]:
    """Blocks of plain text, decompressed if the file is gzip."""
    source = iter(blocks)
    head = b""
    for block in source:
        head += bytes(block)
        if len(head) >= 16:
            break
    for magic, kind in _OTHER_KINDS:
        if head.startswith(magic):
            raise TraceError(f"this is {kind}, not a Kineto trace in JSON or gzip", byte=0)
    produced = 0
    for text in _gunzip(head, source) if head.startswith(_GZIP) else _plain(head, source):
        produced += len(text)
        if produced > limit_bytes:
            raise TraceError(f"the text is longer than the limit of {limit_bytes} bytes", byte=limit_bytes)
        yield text


def _plain(head: bytes, source: Iterator[bytes | memoryview]) -> Iterator[bytes]:
    yield head
    for block in source:
        yield bytes(block)


def _pieces(head: bytes, source: Iterator[bytes | memoryview]) -> Iterator[bytes]:
    for block in _plain(head, source):
        for start in range(0, len(block), _GZIP_BYTES):
            yield block[start : start + _GZIP_BYTES]


def _gunzip(head: bytes, source: Iterator[bytes | memoryview]) -> Iterator[bytes]:
    inflater = zlib.decompressobj(_GZIP_WINDOW)
    pieces = _pieces(head, source)
    waiting, read, ended = b"", 0, False
    while True:
        if not waiting and not ended:
            waiting = next(pieces, b"")
            ended = not waiting
            read += len(waiting)
        if inflater.eof:
            # Gzip members may be concatenated; zeros are padding.
            waiting = waiting.lstrip(b"\0")
            if not waiting and ended:
                return
            if not waiting:
                continue
            if not waiting.startswith(_GZIP[: len(waiting)]):
                raise TraceError(f"unexpected data after the gzip data at byte {read - len(waiting)} of the file")
            inflater = zlib.decompressobj(_GZIP_WINDOW)
        try:
            text = inflater.decompress(waiting, BLOCK_BYTES)
        except zlib.error as error:
            reason = str(error).rsplit(": ", 1)[-1]
            raise TraceError(f"the gzip data is damaged before byte {read} of the file: {reason}") from None
        waiting = inflater.unused_data if inflater.eof else inflater.unconsumed_tail
        if text:
            yield text
        elif ended and not inflater.eof:
            raise TraceError(f"the gzip data ends early, at byte {read} of the file; the file may be truncated")


@dataclass
class Text:
    """A sliding window over the text. Consumed text is released."""

    blocks: Iterator[bytes]
    repairs: Repairs
    held: bytearray = field(default_factory=bytearray)
    offset: int = 0  # position of held[0] in the whole text
    ended: bool = False
    _searched_bytes: int = 0

    def hold(self, count: int) -> None:
        """Hold at least `count` bytes, if there are as many."""
        while len(self.held) < count and not self.ended:
            block = next(self.blocks, None)
            if block is None:
                self.ended = True
            else:
                self.held += block

    def drop(self, count: int) -> None:
        del self.held[:count]
        self.offset += count

    def search(self, count: int) -> None:
        """Account for a search of `count` bytes. Raises TraceError if damage makes the text be searched too often."""
        self._searched_bytes += count
        if self._searched_bytes > _SEARCHED_BYTES + _SEARCHES * (self.offset + len(self.held)):
            raise TraceError("the events are too damaged to be told apart", byte=self.offset)


def find_events(text: Text, *, limit_bytes: int) -> tuple[bytes, int] | None:
    """The text of the outermost object before its traceEvents, completed to an object, and the position of the value
    of traceEvents; None if there is none within the limit. Keys of that name inside other values are skipped."""
    scanner = KeyScanner(b"traceEvents")
    while True:
        text.hold(scanner.scanned + _HEAD_BYTES + scanner.lookahead_bytes)
        end = scanner.scanned + _HEAD_BYTES
        part = bytes(text.held[scanner.scanned : end])
        for place in scanner.scan(part, bytes(text.held[end : end + scanner.lookahead_bytes])):
            while _OPEN.match(text.held, place) and not text.ended and len(text.held) < limit_bytes:
                text.hold(2 * len(text.held))
            value = _VALUE.match(text.held, place)
            if value is not None:
                return bytes(text.held[:place]) + b'"":0}', value.start(1)
        if (text.ended and scanner.scanned >= len(text.held)) or scanner.scanned > limit_bytes:
            return None


@dataclass
class Ending:
    closed: bool = False
    cut: bool = False  # the text ended inside the array


def batches(text: Text, ending: Ending) -> Iterator[Batch]:
    """Yield all events of the array. `text` must be positioned after its opening bracket and ends up after the
    closing one; `ending` then shows how the array ended."""
    reach = PIECE_BYTES
    while not (ending.closed or ending.cut):
        text.hold(reach)
        is_wary = reach < PIECE_BYTES
        text.search(len(text.held) if not is_wary else reach)
        batch = None if is_wary else _decode_likely(text, ending)
        if batch is not None:
            reach = PIECE_BYTES
            yield batch
            continue
        held = bytes(text.held[:reach] if is_wary else text.held)
        is_all = text.ended and len(held) == len(text.held)
        layout = lay_out(held)
        endless = layout.closing is None and not len(layout.commas) and not is_all
        if endless and len(held) < MAX_EVENT_BYTES:
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
    """Cut where an event or the array seems to end, and let the decoder prove it: much cheaper than counting
    brackets. None if the cut was wrong or the text is damaged."""
    pattern = _LIKELY_END if text.ended else _LIKELY_CUT
    cuts = list(pattern.finditer(text.held, max(0, len(text.held) - _CUT_SEARCH_BYTES)))
    if not cuts:
        return None
    # The metadata after the array contains such brackets too; events rarely do.
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
            text.repairs.note("trailing comma in traceEvents removed", byte=text.offset + ends[-2])
        starts, ends = starts[:-1], ends[:-1]
    found, following = decode_pieces(held, starts, ends, text.repairs, offset=text.offset)
    ending.closed = following is None
    text.drop(int(layout.closing or 0) + 1 if following is None else following)
    return found, following


def _finish_cut(text: Text, held: bytes, layout: Layout, ending: Ending) -> tuple[list[Batch], int | None]:
    starts, ends = layout.pieces(len(held))
    found, following = decode_pieces(held, starts[:-1], ends[:-1], text.repairs, offset=text.offset)
    if following is None:
        # Either an incomplete event, or whole ones after a stray quote.
        last = held[starts[-1] :]
        try:
            found.append(decode(last))
        except DECODE_ERRORS:
            following = next_event(held, starts[-1], len(held))
            if following is not None:
                note_unreadable(text.repairs, "unbalanced quotes", byte=text.offset + starts[-1])
    ending.cut = following is None
    text.drop(len(held) if following is None else following)
    return found, following


def _skip_endless(text: Text, held: bytes) -> int:
    reason = f"it is longer than {MAX_EVENT_BYTES} bytes, or a quote is missing"
    following = next_event(held, 0, len(held))
    if following is None:
        raise TraceError(f"an event has no end: {reason}", byte=text.offset)
    note_unreadable(text.repairs, reason, byte=text.offset)
    return following
