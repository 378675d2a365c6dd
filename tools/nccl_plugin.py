"""Builds the NCCL plugin for x86_64 and aarch64. With --check, builds it again and compares it with what is committed.

    python -m tools.nccl_plugin [--check]

The compiler is zig's (setup_zig.sh): it builds for other architectures and for an old C library, and the same source
gives the same bytes on every machine. The libraries are in the repository, so that no compiler is needed to install
Rankscope."""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

COMPILER = Path(__file__).parent / "setup_zig.sh"
FOLDER = Path(__file__).parents[1] / "daemon" / "rankscope" / "probe" / "nccl"
ARCHITECTURES = ("x86_64", "aarch64")
SUMS = "SHA256SUMS"
# The C library of CentOS 7, the oldest that torch supports.
C_LIBRARY = "gnu.2.17"
FLAGS = ("-std=c11", "-O2", "-g0", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror")


def library(architecture: str) -> str:
    return f"librankscope-nccl-{architecture}.so"


def build(folder: Path) -> None:
    """Into a folder, with their hashes."""
    compiler = subprocess.run([COMPILER, "--print"], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    for architecture in ARCHITECTURES:
        command = [compiler, "-target", f"{architecture}-linux-{C_LIBRARY}", *FLAGS, "-Wl,--build-id=none", "-s"]
        subprocess.run([*command, "-o", str(folder / library(architecture)), "plugin.c"], cwd=FOLDER, check=True)
        (folder / library(architecture)).chmod(0o644)
    (folder / SUMS).write_text(sums(folder))


def sums(folder: Path) -> str:
    names = [library(architecture) for architecture in ARCHITECTURES]
    return "".join(f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="build elsewhere, and compare")
    if not parser.parse_args().check:
        build(FOLDER)
        sys.stdout.write((FOLDER / SUMS).read_text())
        return 0
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder))
        if sums(Path(folder)) != (FOLDER / SUMS).read_text() or sums(FOLDER) != (FOLDER / SUMS).read_text():
            sys.stderr.write("error: plugin.c gives other libraries than those in the repository: `make plugin`\n")
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
