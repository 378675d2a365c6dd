"""An ordinary user's process in user, mount and network namespaces of its own, which follows libkineto's protocol."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.integration.kineto_peers import CLIENT, Peer

NOBODY = 65534
# An ordinary user's process with user, mount and network namespaces of its own, in which it is root. The interpreter
# may lie where that user cannot read: program and modules are read before.
OWN_NAMESPACES = f"""
import array, ctypes, json, mmap, os, socket, struct, sys, time
program = open(sys.argv[1]).read()
for path in sys.argv[2:]:
    library = mmap.mmap(os.open(path, os.O_RDONLY), 0, prot=mmap.PROT_READ)
libc = ctypes.CDLL(None, use_errno=True)
os.setgroups([]), os.setgid({NOBODY}), os.setuid({NOBODY})
libc.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: or its own maps may not be written
if libc.unshare(0x10000000 | 0x00020000 | 0x40000000):
    sys.exit(os.strerror(ctypes.get_errno()))
open("/proc/self/setgroups", "w").write("deny")
open("/proc/self/uid_map", "w").write("0 {NOBODY} 1")
open("/proc/self/gid_map", "w").write("0 {NOBODY} 1")
exec(compile(program, sys.argv[1], "exec"))
"""


@contextmanager
def tenant(*libraries: Path, **environment: str) -> Iterator[Peer]:
    """`libraries` are mapped, as torch's would be."""
    command = [sys.executable, "-I", "-S", "-c", OWN_NAMESPACES, str(CLIENT), *map(str, libraries)]
    everything = {**os.environ, **environment}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=everything)
    try:
        peer = Peer(process)
        within(peer, "mount -t tmpfs none /tmp && chmod 1777 /tmp")
        yield peer
    finally:
        process.kill()
        process.communicate()


def within(peer: Peer, script: str, *words: object) -> None:
    """As the tenant, in its namespaces."""
    enter = ["nsenter", "--target", str(peer.pid), "--user", "--mount", "sh", "-ec", script, "sh", *map(str, words)]
    done = subprocess.run(enter, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
