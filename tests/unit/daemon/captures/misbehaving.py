"""A process that does what it must not, within the limits of those that read what containers wrote."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from rankscope.daemon.captures.processing.sandbox import confine


def main(folder: Path) -> None:
    confine(memory_bytes=1 << 30, cpu_seconds=20, file_bytes=1 << 20)
    what = (folder / "what").read_text()
    if what == "crash":
        os.abort()
    if what == "memory":
        bytearray(2 << 30)
    if what == "little memory":
        bytearray(256 << 20)
    if what == "disk":
        (folder / "large").write_bytes(bytes(2 << 20))
    if what == "hang":
        time.sleep(600)
    sys.exit("out of order")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
