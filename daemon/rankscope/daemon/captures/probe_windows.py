"""Several windows that the probe packed into one trace, taken apart. The sizes in it are as hostile as the rest."""

from __future__ import annotations

import os
from pathlib import Path

from rankscope.daemon.captures.orders import CaptureError
from rankscope.probe import layout


def window_file(first: Path, number: int) -> Path:
    """Of window 0, 1, 2, …: `rank3.json`, `rank3.window2.json`, `rank3.window3.json`; the same of artifacts."""
    name, dot, kinds = first.name.partition(".")
    return first.with_name(f"{name}.window{number + 1}{dot}{kinds}") if number else first


def take_apart(packed: Path, most: int, who: str) -> tuple[Path, ...]:
    """The files of all windows; what was packed becomes the first of them. Raises CaptureError if it is not what the
    probe packs."""
    with packed.open("r+b") as file:
        sizes = _sizes(file.fileno(), most)
        if sizes is None:
            raise CaptureError(f"{who}: what the probe handed over is not a trace of several windows; not kept")
        paths = [window_file(packed, number) for number in range(len(sizes))]
        offset = sizes[0]
        for path, size in zip(paths[1:], sizes[1:], strict=True):
            with path.open("xb") as window:
                left = size
                while left > 0 and (sent := os.sendfile(window.fileno(), file.fileno(), offset, left)) > 0:
                    offset, left = offset + sent, left - sent
        file.truncate(sizes[0])
    return tuple(paths)


def _sizes(descriptor: int, most: int) -> list[int] | None:
    total = os.fstat(descriptor).st_size
    end = os.pread(descriptor, layout.WINDOWS.size, max(0, total - layout.WINDOWS.size))
    count, mark = layout.WINDOWS.unpack(end) if len(end) == layout.WINDOWS.size else (0, b"")
    table_bytes = count * layout.WINDOW_BYTES.size
    if mark == layout.WINDOWS_MARK and 0 < count <= most and total >= table_bytes + len(end):
        table = os.pread(descriptor, table_bytes, total - len(end) - table_bytes)
        sizes = [size for (size,) in layout.WINDOW_BYTES.iter_unpack(table)]
        if sum(sizes) == total - len(end) - table_bytes:
            return sizes
    return None
