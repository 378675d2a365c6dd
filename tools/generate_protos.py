"""Generate the Python code of `proto/`, or with --check tell whether what is committed is fresh."""

from __future__ import annotations

import argparse
import filecmp
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PROTO_ROOT = Path(__file__).resolve().parent.parent / "proto"
PACKAGE = Path("rankscope/v1")


def generate(output_root: Path) -> None:
    sources = sorted(str(path.relative_to(PROTO_ROOT)) for path in (PROTO_ROOT / PACKAGE).glob("*.proto"))
    plugins = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={PROTO_ROOT}"]
    kinds = ("python", "grpc_python", "mypy", "mypy_grpc")
    command += [f"--{kind}_out={output_root}" for kind in kinds]
    subprocess.run([*command, *sources], check=True, env=plugins, stderr=subprocess.DEVNULL)
    for path in (output_root / PACKAGE).glob("*_pb2_grpc.py*"):
        # A file of messages alone has no service; its empty stub module is noise.
        if f"{path.name.partition('_pb2')[0]}.proto" not in _files_with_services():
            path.unlink()


def _files_with_services() -> set[str]:
    return {p.name for p in (PROTO_ROOT / PACKAGE).glob("*.proto") if "\nservice " in p.read_text()}


def stale_files(fresh_root: Path) -> list[str]:
    fresh = {path.name for path in (fresh_root / PACKAGE).glob("*_pb2*")}
    committed = {path.name for path in (PROTO_ROOT / PACKAGE).glob("*_pb2*.py*")}
    _same, different, missing = filecmp.cmpfiles(fresh_root / PACKAGE, PROTO_ROOT / PACKAGE, fresh, shallow=False)
    return sorted({*different, *missing, *(committed - fresh)})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the committed code differs; write nothing")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        if arguments.check:
            stale = stale_files(Path(scratch))
            if stale:
                print(f"error: generated code is not fresh: {', '.join(stale)}. Next step: make proto", file=sys.stderr)
            return 1 if stale else 0
        for old in (PROTO_ROOT / PACKAGE).glob("*_pb2*.py*"):
            old.unlink()
        for path in (Path(scratch) / PACKAGE).glob("*_pb2*"):
            shutil.copy(path, PROTO_ROOT / PACKAGE / path.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
