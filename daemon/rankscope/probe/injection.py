"""Lays the probe out for injection into programs that do not have Rankscope installed.

    python -m rankscope.probe.injection /target      copies the probe; then PYTHONPATH=/target starts it

The folder holds sitecustomize.py and rankscope/probe/, nothing else, so an init container can fill an empty volume
with it. On a machine that has the package, `inject_folder()` on PYTHONPATH does the same without a copy."""

from __future__ import annotations

import os
import shutil
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def inject_folder() -> str:
    return os.path.join(_HERE, "inject")


def copy_to(target: str) -> None:
    """Each file appears under its name only when complete: a program may be starting from the folder right now."""
    package = os.path.join(target, "rankscope", "probe")
    for folder, ending in (("", ".py"), ("nccl", ".so")):
        os.makedirs(os.path.join(package, folder), exist_ok=True)
        for name in sorted(os.listdir(os.path.join(_HERE, folder))):
            if name.endswith(ending):
                _copy(os.path.join(_HERE, folder, name), os.path.join(package, folder, name))
    _copy(os.path.join(inject_folder(), "sitecustomize.py"), os.path.join(target, "sitecustomize.py"))


def _copy(source: str, target: str) -> None:
    shutil.copyfile(source, target + ".new")
    os.replace(target + ".new", target)


def main() -> int:
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m rankscope.probe.injection FOLDER\n")
        return 2
    copy_to(sys.argv[1])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
