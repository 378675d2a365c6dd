"""A stand-in for the NVIDIA driver's library, for tests and benchmarks on machines without a GPU.

`build_stub` compiles it with the library's own soname: a process that has loaded it, or that finds its folder on
LD_LIBRARY_PATH, gets it when it asks for `libnvidia-ml.so.1`. A `Script` is the file that steers it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "RANKSCOPE_NVML_STUB"
_SOURCE = Path(__file__).parent / "libnvidia_ml_stub.c"
_LIBRARY = "libnvidia-ml.so.1"


def build_stub(folder: Path) -> Path:
    library = folder / _LIBRARY
    command = ["cc", "-O1", "-Wall", "-shared", "-fPIC", "-fvisibility=hidden", f"-Wl,-soname,{_LIBRARY}"]
    subprocess.run([*command, "-o", str(library), str(_SOURCE), "-lpthread"], check=True)
    return library


class Script:
    """What the stub says from now on; the keys are listed at the top of `libnvidia_ml_stub.c`."""

    def __init__(self, path: Path, **lines: object) -> None:
        self.path = path
        self._lines: dict[str, object] = {}
        self.set(lines)

    def set(self, lines: Mapping[str, object]) -> None:
        """None takes a line back."""
        self._lines.update(lines)
        self._lines = {key: value for key, value in self._lines.items() if value is not None}
        # Renamed into place: the stub reads at any moment and must not see half of it.
        writing = self.path.with_suffix(".writing")
        writing.write_text("".join(f"{key}={value}\n" for key, value in self._lines.items()))
        writing.replace(self.path)

    def clear(self) -> None:
        self.set(dict.fromkeys(self._lines))

    def environment(self, library: Path) -> dict[str, str]:
        """For a process that is to find the stub instead of a driver."""
        return {**os.environ, VARIABLE: str(self.path), "LD_LIBRARY_PATH": str(library.parent)}
