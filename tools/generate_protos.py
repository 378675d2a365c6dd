"""Generate the Python code of `proto/`, or with --check tell whether what is committed is fresh."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PROTO_ROOT = Path(__file__).resolve().parent.parent / "proto"
GENERATED = "**/*_pb2*.py*"


def generate(output_root: Path) -> None:
    sources = sorted(PROTO_ROOT.glob("rankscope/*/*.proto"))
    plugins = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={PROTO_ROOT}"]
    kinds = ("python", "grpc_python", "mypy", "mypy_grpc")
    command += [f"--{kind}_out={output_root}" for kind in kinds]
    subprocess.run([*command, *map(str, sources)], check=True, env=plugins, stderr=subprocess.DEVNULL)
    for source in sources:
        # A file of messages alone has no service; its empty stub module is noise.
        if "\nservice " not in source.read_text():
            folder = output_root / source.parent.relative_to(PROTO_ROOT)
            for path in folder.glob(f"{source.stem}_pb2_grpc.py*"):
                path.unlink()


def _generated(root: Path) -> dict[Path, bytes]:
    return {path.relative_to(root): path.read_bytes() for path in root.glob(GENERATED) if path.suffix != ".pyc"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the committed code differs; write nothing")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh, committed = _generated(Path(scratch)), _generated(PROTO_ROOT)
        if arguments.check:
            stale = sorted(
                str(path) for path in fresh.keys() | committed.keys() if fresh.get(path) != committed.get(path)
            )
            if stale:
                print(f"error: generated code is not fresh: {', '.join(stale)}. Next step: make proto", file=sys.stderr)
            return 1 if stale else 0
        for path in committed:
            (PROTO_ROOT / path).unlink()
        for path in fresh:
            shutil.copy(Path(scratch) / path, PROTO_ROOT / path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
