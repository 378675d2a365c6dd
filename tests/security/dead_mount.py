"""A rank with a FUSE mount that stops answering: a process that touches a file there waits until the server ends, and
SIGKILL does not help. Each way to be touched is one argument.

    library: what py-spy opens first, the file of a libpython, is on the mount
    ring:    a descriptor is named like a ring and leads to the mount
    exec:    an exec does not end, and until then nothing that shows the process' memory can be opened
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.security.bystander import Bystander

# Of linux/fuse.h.
LOOKUP, GETATTR, OPEN, INIT = 1, 3, 14, 26
REQUEST, REPLY = struct.Struct("<IIQQIIIHH"), struct.Struct("<IiQ")
VERSION = struct.pack("<IIIIHHIIHHI", 7, 31, 65536, 0, 0, 0, 65536, 1, 0, 0, 0).ljust(64, b"\0")
ENTRY = struct.pack("<QQQQII", 2, 0, 0, 0, 0, 0)
OPENED = struct.pack("<QII", 1, 0, 0)
FOLDER_MODE, FILE_MODE = 0o40755, 0o100755
PAGE = mmap.PAGESIZE
ENOENT = 2
MS_DETACH, MAP_FIXED_NOREPLACE = 2, 0x100000
LOW_ADDRESS = 0x10000000  # before all other mappings: py-spy takes the first libpython
FILE, RING_FILE, LAST_WORDS = "libpython3.11.so.1.0", "memfd:rankscope-ring", "die"


def attributes(node: int) -> bytes:
    mode, size = (FOLDER_MODE, 0) if node == 1 else (FILE_MODE, PAGE)
    return struct.pack("<QQQQQQIIIIIIIIII", node, size, 8, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, PAGE, 0)


def serve(device: int) -> None:
    """Every name is a file, until LAST_WORDS is looked up; then only the folder itself answers. A request that was read
    and not answered cannot be interrupted."""
    is_dead = False
    while True:
        request = os.read(device, 1 << 17)
        _, operation, unique, node, *_ = REQUEST.unpack_from(request)
        error, body = 0, b""
        if operation == INIT:
            body = VERSION
        elif operation == GETATTR and (node == 1 or not is_dead):
            body = struct.pack("<QII", 0, 0, 0) + attributes(node)
        elif is_dead:
            continue
        elif operation == LOOKUP:
            is_dead = request[REQUEST.size :].startswith(LAST_WORDS.encode() + b"\0")
            error, body = (-ENOENT, b"") if is_dead else (0, ENTRY + attributes(2))
        elif operation == OPEN:
            body = OPENED
        os.write(device, REPLY.pack(REPLY.size + len(body), error, unique) + body)


def mount(folder: Path) -> None:
    device = os.open("/dev/fuse", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
    if libc.mount(b"dead", bytes(folder), b"fuse", 0, options) != 0:
        raise OSError(ctypes.get_errno(), "mount")
    if os.fork() == 0:
        serve(device)
    os.close(device)


def mapped(descriptor: int, address: int = 0) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_size_t
    libc.mmap.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    flags = mmap.MAP_PRIVATE | (MAP_FIXED_NOREPLACE if address else 0)
    assert libc.mmap(address, PAGE, mmap.PROT_READ | mmap.PROT_EXEC, flags, descriptor, 0) != ctypes.c_size_t(-1).value


def main(kind: str, folder: Path) -> None:
    torch = folder / "libtorch_cpu.so"  # a rank is known by the torch it has loaded
    torch.write_bytes(b"\0" * PAGE)
    mapped(os.open(torch, os.O_RDONLY))
    dead = folder / "dead"
    dead.mkdir()
    if kind == "library":
        (dead / FILE).write_bytes(b"\0" * PAGE)
        mapped(os.open(dead / FILE, os.O_RDONLY), LOW_ADDRESS)
        mount(dead)
        (dead / LAST_WORDS).exists()
    elif kind == "ring":
        mount(dead)
        os.open(dead / RING_FILE, os.O_RDWR)
        (dead / LAST_WORDS).exists()
        # Without a place in the tree, its link in /proc begins at the mount itself: "/memfd:rankscope-ring".
        ctypes.CDLL(None).umount2(bytes(dead), MS_DETACH)
    elif kind == "exec":
        mount(dead)
        os.open(dead / FILE, os.O_RDWR | os.O_CLOEXEC)
        (dead / LAST_WORDS).exists()
        print("ready", flush=True)
        # Closes the file while it holds the lock that readers of environ and maps need.
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)"])
    print("ready", flush=True)
    time.sleep(600)


@contextmanager
def rank_with_dead_mount(kind: str, folder: Path, bystander: Bystander, *, is_rank: bool = True) -> Iterator[None]:
    """On the bystander's node, in a mount and pid namespace of its own; with it all ends, the mount included."""
    from tests.security.rank_processes import rank_variables

    folder.mkdir()
    variables = rank_variables(0, 1, "10.6.6.6") if is_rank else {}
    environment = {"PATH": os.environ["PATH"], **variables}
    namespace = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
    command = [*bystander.enter, *namespace, sys.executable, "-I", __file__, kind, str(folder)]
    with bystander.node():
        started = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert started.stdout is not None
        assert started.stdout.readline() == "ready\n"
        yield
    finally:
        started.kill()
        started.communicate()


if __name__ == "__main__":
    # The first process of the namespace must not wait for the mount: with it, the others are killed.
    if os.fork():
        signal.pause()
    main(sys.argv[1], Path(sys.argv[2]))
