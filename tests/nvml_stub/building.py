"""Compiles the stub. The result has the driver library's own soname: a process that has loaded it, or that finds its
folder on LD_LIBRARY_PATH, gets it when it asks for `libnvidia-ml.so.1`."""

from __future__ import annotations

import subprocess
from pathlib import Path

SOURCE = Path(__file__).parent / "libnvidia_ml_stub.c"
LIBRARY = "libnvidia-ml.so.1"


def build_stub(folder: Path) -> Path:
    library = folder / LIBRARY
    command = ["cc", "-O1", "-Wall", "-shared", "-fPIC", "-fvisibility=hidden", f"-Wl,-soname,{LIBRARY}"]
    subprocess.run([*command, "-o", str(library), str(SOURCE), "-lpthread"], check=True)
    return library
