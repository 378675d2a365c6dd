"""A root that stands in for the base image: a Python with pip in /usr/local, Debian's programs and libraries around it.

What cannot be had without an engine is the base image itself. The Python here is a copy of one of this machine (3.12
where there is one, as in the image), put where the image has it, without bytecode, as the image has it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

from tools.lock_images import PYTHON_MINORS

VERSIONS = tuple(f"3.{minor}" for minor in PYTHON_MINORS)
LEFT_OUT = (
    "__pycache__",
    "test",
    "tests",
    "site-packages",
    "dist-packages",
    "idlelib",
    "tkinter",
    "turtledemo",
    "config-*",
)
ASK = """
import ensurepip, json, ssl, sys, sysconfig, venv
from os.path import realpath
print(json.dumps({
    "program": realpath(sys._base_executable), "version": sysconfig.get_python_version(),
    "stdlib": sysconfig.get_path("stdlib"), "library": sysconfig.get_config_var("LDLIBRARY"),
    "libraries": sysconfig.get_config_var("LIBDIR"),
}))
"""
PIP = """#!/usr/local/bin/python3
import sys
sys.path.insert(0, "/usr/local/share/pip")
from pip._internal.cli.main import main
sys.exit(main())
"""


@dataclass(frozen=True)
class Interpreter:
    program: Path
    version: str  # 3.12
    stdlib: Path
    shared_library: Path | None

    @property
    def environment(self) -> dict[str, str]:
        """A Python built with a library of its own would else find Debian's."""
        return {"LD_LIBRARY_PATH": "/usr/local/lib"} if self.shared_library else {}


def find_interpreter() -> Interpreter:
    for name in ("python3.12", sys.executable, "python3.11", "python3.13"):
        found = shutil.which(name)
        asked = subprocess.run([found, "-I", "-c", ASK], capture_output=True, text=True) if found else None
        told = json.loads(asked.stdout) if asked and asked.returncode == 0 else {}
        if told.get("version") in VERSIONS:
            library = Path(told["libraries"]) / told["library"]
            shared = library.resolve() if library.suffix == ".so" and _needs(told["program"], library) else None
            return Interpreter(Path(told["program"]), told["version"], Path(told["stdlib"]), shared)
    pytest.skip(f"no Python with ssl and venv of those that the images' locks are made for: {', '.join(VERSIONS)}")


def _needs(program: str, library: Path) -> bool:
    asked = subprocess.run(["ldd", program], capture_output=True, text=True)
    return library.name in asked.stdout and library.exists()


def make_base(root: Path, interpreter: Interpreter) -> Path:
    """Returns the folder that pip can be imported from."""
    local = root / "usr" / "local"
    # /usr/local is an environment of a Python inside it: Debian's would else keep packages where the image's does not.
    own = local / "lib" / "own"
    shutil.copytree(
        interpreter.stdlib,
        own / "lib" / f"python{interpreter.version}",
        symlinks=True,
        ignore=shutil.ignore_patterns(*LEFT_OUT),
    )
    for folder in (own / "bin", local / "bin", local / "lib" / f"python{interpreter.version}" / "site-packages"):
        folder.mkdir(parents=True)
    shutil.copy2(interpreter.program, own / "bin" / f"python{interpreter.version}")
    for name in ("python", "python3"):
        (own / "bin" / name).symlink_to(f"python{interpreter.version}")
        (local / "bin" / name).symlink_to(f"../lib/own/bin/{name}")
    (local / "pyvenv.cfg").write_text(f"home = /usr/local/lib/own/bin\nversion = {interpreter.version}\n")
    if interpreter.shared_library:
        (local / "lib" / interpreter.shared_library.name).write_bytes(interpreter.shared_library.read_bytes())
    pip = bring_pip(local)
    (local / "bin" / "pip").write_text(PIP)
    (local / "bin" / "pip").chmod(0o755)
    for folder in ("dev", "etc", "opt", "proc", "run", "sys", "var"):
        (root / folder).mkdir()
    (root / "tmp").mkdir(mode=0o1777)
    (root / "tmp").chmod(0o1777)
    for name in ("bin", "lib", "lib64", "sbin"):
        (root / "usr" / name).mkdir()
        if Path("/", name).is_symlink():
            (root / name).symlink_to(Path("usr", name))
    return pip


def bring_pip(local: Path) -> Path:
    """This environment's own; Debian's Python comes without."""
    packages = Path(sysconfig.get_path("purelib"))
    shutil.copytree(packages / "pip", local / "share" / "pip" / "pip", ignore=shutil.ignore_patterns("__pycache__"))
    return local / "share" / "pip"
