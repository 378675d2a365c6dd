"""The wheels that the locks name, fetched once, by hash, and kept in .image-wheels: builds themselves are offline.

`python -m tests.images.image_wheels` fetches them before the tests, which have no network (tools/sandbox.py)."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.images.base_root import Interpreter, bring_pip, find_interpreter
from tests.images.project_reading import ROOT

FETCH_SECONDS = 280
LOCKS = [ROOT / "deploy" / "docker" / f"{name}.lock" for name in ("build", "daemon", "operator")]


def fetch_wheels(interpreter: Interpreter, pip: Path, kept: Path = ROOT / ".image-wheels") -> Path:
    """A folder named after what is in it; `pip` is a folder to import pip from."""
    key = hashlib.sha256(b"".join(lock.read_bytes() for lock in LOCKS)).hexdigest()[:16]
    folder = kept / f"{interpreter.version}-{key}"
    complete = folder / "complete"
    if complete.exists():
        return folder
    for old in kept.glob(f"{interpreter.version}-*"):
        shutil.rmtree(old)
    folder.mkdir(parents=True)
    for lock in LOCKS:
        command = [str(interpreter.program), "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        command += ["--require-hashes", "--only-binary", ":all:", "--dest", str(folder), "--requirement", str(lock)]
        environment = {**os.environ, "PYTHONPATH": str(pip)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_SECONDS, env=environment)
        assert done.returncode == 0, f"{lock.name}: {done.stderr}"
    complete.touch()
    return folder


def main() -> None:
    try:
        interpreter = find_interpreter()
    except pytest.skip.Exception:
        return  # the tests say why
    with tempfile.TemporaryDirectory() as folder:
        fetch_wheels(interpreter, bring_pip(Path(folder)))


if __name__ == "__main__":
    main()
