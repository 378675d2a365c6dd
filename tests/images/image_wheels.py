"""The wheels that the locks name, fetched once, by hash, and kept in .image-wheels: builds themselves are offline."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from tests.images.base_root import Interpreter

FETCH_SECONDS = 280


def fetch_wheels(locks: list[Path], interpreter: Interpreter, pip: Path, kept: Path) -> Path:
    """A folder named after what is in it; `pip` is a folder to import pip from."""
    key = hashlib.sha256(b"".join(lock.read_bytes() for lock in locks)).hexdigest()[:16]
    folder = kept / f"{interpreter.version}-{key}"
    complete = folder / "complete"
    if complete.exists():
        return folder
    for old in kept.glob(f"{interpreter.version}-*"):
        shutil.rmtree(old)
    folder.mkdir(parents=True)
    for lock in locks:
        command = [str(interpreter.program), "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        command += ["--require-hashes", "--only-binary", ":all:", "--dest", str(folder), "--requirement", str(lock)]
        environment = {**os.environ, "PYTHONPATH": str(pip)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_SECONDS, env=environment)
        assert done.returncode == 0, f"{lock.name}: {done.stderr}"
    complete.touch()
    return folder
