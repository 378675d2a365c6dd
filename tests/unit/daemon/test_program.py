from __future__ import annotations

import os
from pathlib import Path

import pytest

from rankscope.daemon.discovery.ranks import MAX_COMMAND_LINE_BYTES, NAME_CHARACTERS, command_of, read_program
from rankscope.daemon.samples import Program


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["/usr/bin/python3.11", "-u", "/home/ann/train.py", "--token", "s3cret"], "python train.py"),
        (["python", "-X", "importtime", "-W", "ignore", "train.py"], "python train.py"),
        (["python", "-m", "package.train", "--lr", "1"], "python -m package.train"),
        (["python", "-c", "password = 'x'"], "python -c"),
        (["python3"], "python"),
        (["/opt/bin/trainer", "--key", "s3cret"], "trainer"),
        (["ray::Worker token=s3cret"], "ray::Worker"),
        (["python", "a\x1b[31m\n" + "b" * 500], None),
        ([""], ""),
        ([], ""),
    ],
)
def test_a_command_is_program_and_script_without_arguments(words: list[str], command: str | None) -> None:
    found = command_of("\0".join([*words, ""]).encode())
    assert len(found) <= NAME_CHARACTERS and found.isprintable()
    assert "s3cret" not in found and "password" not in found
    assert command is None or found == command


def process(folder: Path, command: bytes) -> str:
    (folder / "cmdline").write_bytes(command)
    return str(folder)


def test_user_comes_from_the_kernel_and_team_from_slurm(tmp_path: Path) -> None:
    passwd = tmp_path / "passwd"
    passwd.write_text("root:x:0:0::/root:/bin/sh\nann:x:1001:1001::/home/ann:/bin/sh\nbroken\nodd:x:y:z\n")
    folder = process(tmp_path, b"python\0train.py\0")
    claims = {"SLURM_JOB_USER": "root", "SLURM_JOB_ACCOUNT": "vision"}
    assert read_program(folder, 1001, claims, passwd) == Program("python train.py", "ann", "vision")
    assert read_program(folder, 1001, {}, passwd) == Program("python train.py", "ann", "ann")
    # Of a user whom only a directory service knows.
    assert read_program(folder, 7, {"SLURM_JOB_USER": "bo\x1b"}, passwd).user == "bo\ufffd"
    assert read_program(folder, 7, {}, passwd) == Program("python train.py", "uid7", "uid7")


def test_users_of_a_pod_are_not_users_of_the_machine(tmp_path: Path) -> None:
    folder = process(tmp_path, b"python\0train.py\0")
    claims = {"SLURM_JOB_USER": "root", "SLURM_JOB_ACCOUNT": "vision"}
    assert read_program(folder, None, claims) == Program("python train.py")


def test_a_long_command_line_is_read_to_its_bound(tmp_path: Path) -> None:
    folder = process(tmp_path, b"python\0" + b"-u\0" * MAX_COMMAND_LINE_BYTES + b"train.py\0")
    assert read_program(folder, None, {}).command == "python"


def test_this_process_has_a_program() -> None:
    program = read_program("/proc/self", os.getuid(), {})
    assert program.command.startswith("python") and program.user == program.team != ""
