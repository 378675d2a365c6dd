"""The libraries of the NCCL plugin that are in the repository: from the source beside them, for old machines."""

from __future__ import annotations

import struct
import subprocess
import sys

import pytest

from tools.nccl_plugin import ARCHITECTURES, FOLDER, SUMS, library, sums

# Of the ELF header: the machine, as its architecture numbers it.
MACHINES = {"x86_64": 62, "aarch64": 183}
MAX_BYTES = 16 << 10


def test_a_build_gives_the_libraries_in_the_repository() -> None:
    done = subprocess.run([sys.executable, "-m", "tools.nccl_plugin", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_hashes_are_those_of_the_libraries() -> None:
    assert (FOLDER / SUMS).read_text() == sums(FOLDER)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_library_is_small_and_of_its_architecture(architecture: str) -> None:
    data = (FOLDER / library(architecture)).read_bytes()
    assert len(data) <= MAX_BYTES
    assert struct.unpack_from("<H", data, 18)[0] == MACHINES[architecture]
    for version in (4, 5, 6):
        assert f"ncclProfiler_v{version}".encode() in data
