from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope.daemon import procfs
from rankscope.daemon.discovery.ranks import RankDiscovery
from rankscope.probe import ring_layout

# What a second daemon on the same machine does in every window, or when it leaves a command, held open.
READER = """
import os, sys
descriptor = os.open(sys.argv[1], int(sys.argv[2]))
print("reading", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY])
def test_who_looks_into_a_ring_is_not_who_keeps_it(flags: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    ring = os.memfd_create(ring_layout.RING_NAME)
    try:
        with subprocess.Popen(
            [sys.executable, "-c", READER, f"/proc/{os.getpid()}/fd/{ring}", str(flags)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as reader:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "reading\n"
            links = [str(link.readlink()) for link in Path(f"/proc/{reader.pid}/fd").iterdir()]
            assert any(link.startswith(procfs.RING_LINK_PREFIX) for link in links)
            assert procfs.ring_inode(f"/proc/{reader.pid}") is None
            assert procfs.ring_inode(f"/proc/{os.getpid()}") == os.fstat(ring).st_ino
            assert reader.pid not in [rank.pid for rank in RankDiscovery().scan().ranks]
            reader.communicate()
    finally:
        os.close(ring)
