"""Wheels into a folder that PYTHONPATH can name, with nothing but the standard library: a GPU machine may have no pip,
and reach no index.

    python3 benchmarks/gpu/unpacking.py gpu-wheels TARGET     prints what to put on PYTHONPATH and on PATH, a line each
    python3 benchmarks/gpu/unpacking.py --check gpu-wheels 3.12 x86_64

numpy is used only where the interpreter has none: torch was built against the one beside it."""

from __future__ import annotations

import importlib.util
import platform
import sys
import zipfile
from pathlib import Path

ONLY_IF_MISSING = ("numpy",)
SCRIPTS = ".data/scripts/"


def misfit(wheel: Path, python: tuple[int, int], machine: str) -> str | None:
    """Why a wheel cannot be used there; None if it can."""
    interpreters, abis, platforms = wheel.stem.rsplit("-", 3)[1:]
    major, minor = python
    known = {f"cp{major}{minor}", f"py{major}", f"py{major}{minor}"}
    if "abi3" in abis.split("."):
        known |= {f"cp{major}{older}" for older in range(2, minor + 1)}
    if not known & set(interpreters.split(".")):
        return f"for {interpreters}, not for Python {major}.{minor}"
    if not {f"cp{major}{minor}", "abi3", "none"} & set(abis.split(".")):
        return f"for the ABI {abis}, not for Python {major}.{minor}"
    if not any(one == "any" or (one.startswith("manylinux") and one.endswith(machine)) for one in platforms.split(".")):
        return f"for {platforms}, not for Linux on {machine}"
    return None


def check(folder: Path, python: tuple[int, int], machine: str) -> list[Path]:
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise SystemExit(f"{folder}: no wheels in it; make them with benchmarks/gpu/pack.sh")
    wrong = [f"{wheel.name}: {why}" for wheel in wheels if (why := misfit(wheel, python, machine))]
    if wrong:
        raise SystemExit("\n".join((*wrong, "fetch others with PLATFORM=… PYTHON_VERSION=… benchmarks/gpu/pack.sh")))
    return wheels


def unpack(folder: Path, target: Path) -> tuple[Path, Path]:
    """Where modules are, and where programs are."""
    modules, programs = target / "modules", target / "bin"
    programs.mkdir(parents=True, exist_ok=True)
    for wheel in check(folder, sys.version_info[:2], platform.machine()):
        name = wheel.name.split("-")[0].lower()
        if name in ONLY_IF_MISSING and importlib.util.find_spec(name) is not None:
            continue
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(modules)
            for entry in archive.namelist():
                if SCRIPTS in entry and not entry.endswith("/"):
                    program = programs / Path(entry).name
                    program.write_bytes(archive.read(entry))
                    program.chmod(0o755)
    return modules, programs


def main() -> None:
    if sys.argv[1:2] == ["--check"] and len(sys.argv) == 5:
        major, minor = sys.argv[3].split(".")
        check(Path(sys.argv[2]), (int(major), int(minor)), sys.argv[4])
    elif len(sys.argv) == 3:
        print(*unpack(Path(sys.argv[1]), Path(sys.argv[2]).resolve()), sep="\n")
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
