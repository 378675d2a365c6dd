"""Folders for targets that read files: in memory, one for each process, gone with it."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path


def scratch_folder(name: str) -> Path:
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix=f"rankscope-fuzz-{name}-", dir=memory if memory.is_dir() else None))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
