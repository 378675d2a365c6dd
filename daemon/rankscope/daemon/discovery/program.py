"""What a rank runs, and for whom: program and script, user, team. Fleet reports group runs by these.

Arguments may hold secrets and stay where they are. The process writes its command line and environment itself, so both
are bounded and made printable. The user comes from the kernel."""

from __future__ import annotations

import re
from contextlib import suppress
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Final

from rankscope.common.text import printable
from rankscope.daemon import procfs
from rankscope.daemon.discovery.rank_environment import Variables
from rankscope.daemon.samples import Program

NAME_CHARACTERS: Final = 64
MAX_COMMAND_LINE_BYTES: Final = 4096
MAX_PASSWD_BYTES: Final = 1 << 20
# Options of Python that take the next word.
_WITH_VALUE: Final = ("-W", "-X", "--check-hash-based-pycs")
_PYTHON: Final = re.compile(r"python[0-9.]*")


def read_program(process: str, uid: int | None, environment: Variables, passwd: Path = Path("/etc/passwd")) -> Program:
    """`uid` is None in a pod: its users are not those of this machine, and the operator knows its team."""
    command = ""
    with suppress(OSError):
        command = command_of(procfs.read_bounded(f"{process}/cmdline", MAX_COMMAND_LINE_BYTES))
    if uid is None:
        return Program(command)
    # Directory services may block, so only the file is asked. A name from Slurm is the process' own claim.
    user = _users(passwd).get(uid) or _name(environment, "SLURM_JOB_USER") or f"uid{uid}"
    return Program(command, user, _name(environment, "SLURM_JOB_ACCOUNT") or user)


def command_of(line: bytes) -> str:
    """`python train.py`, `python -m package.train`: without paths and arguments."""
    # A process that renames itself may leave one long word with anything in it.
    words = [word.decode("utf-8", "replace") for word in line.split(b"\0")]
    program = _base((words[0].split() or [""])[0])
    if not _PYTHON.fullmatch(program):
        return printable(program, NAME_CHARACTERS)
    rest = iter(words[1:])
    for word in rest:
        if word in _WITH_VALUE:
            next(rest, "")
        elif word == "-m":
            return printable(f"python -m {(next(rest, '').split() or [''])[0]}", NAME_CHARACTERS)
        elif word == "-c":
            return "python -c"
        elif word and not word.startswith("-"):
            return printable(f"python {_base(word)}", NAME_CHARACTERS)
    return "python"


def _base(path: str) -> str:
    return PurePosixPath(path).name


def _name(environment: Variables, name: str) -> str:
    return printable((environment.get(name) or "").strip(), NAME_CHARACTERS)


@lru_cache(maxsize=1)
def _users(passwd: Path) -> dict[int, str]:
    """Read once: users of a machine are few, and seldom new."""
    try:
        text = procfs.read_bounded(str(passwd), MAX_PASSWD_BYTES).decode("utf-8", "replace")
    except OSError:
        return {}
    rows = (line.split(":") for line in text.splitlines())
    return {int(row[2]): printable(row[0], NAME_CHARACTERS) for row in rows if len(row) > 2 and row[2].isdecimal()}
