"""From the bytes of a file to blocks of JSON text: decompressed piece by piece, never more than was allowed."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

from rankscope.analysis.traces.reading.refusing import TraceError

BLOCK_BYTES = 1 << 20
TEXT_LIMIT_BYTES = 16 << 30

_GZIP = b"\x1f\x8b"
_GZIP_WINDOW = 31  # zlib's word for "a gzip header, and check the sum at its end"
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


def blocks_of(data: bytes | bytearray | memoryview) -> Iterator[memoryview]:
    view = memoryview(data).cast("B")
    for start in range(0, len(view), BLOCK_BYTES):
        yield view[start : start + BLOCK_BYTES]


def inflate(blocks: Iterable[bytes | memoryview], *, limit_bytes: int = TEXT_LIMIT_BYTES) -> Iterator[bytes]:
    """Blocks of plain text, whether the file was gzip or not."""
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


def _gunzip(head: bytes, source: Iterator[bytes | memoryview]) -> Iterator[bytes]:
    inflater = zlib.decompressobj(_GZIP_WINDOW)
    waiting, read, ended = head, len(head), False
    while True:
        if not waiting and not ended:
            block = next(source, b"")
            ended, waiting = len(block) == 0, bytes(block)
            read += len(waiting)
        if inflater.eof:
            # Members may follow one another; zeros are a tape's padding.
            waiting = waiting.lstrip(b"\0")
            if not waiting and ended:
                return
            if not waiting:
                continue
            if not waiting.startswith(_GZIP[: len(waiting)]):
                raise TraceError(f"something else follows the gzip data at byte {read - len(waiting)} of the file")
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
            raise TraceError(f"the gzip data ends early, at byte {read} of the file; was it cut off while copied?")
