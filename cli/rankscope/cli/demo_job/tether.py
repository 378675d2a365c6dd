"""Executes another program that the kernel ends when the launcher dies, for any reason.

A separate program rather than a `preexec_fn`: forking a launcher with threads (such as gRPC's) is not safe."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
# Where Yama lets only ancestors read a process (Ubuntu's default), this allows an ordinary user's py-spy. Elsewhere the
# call fails, which does no harm.
_PR_SET_PTRACER = 0x59616D61
_ANYBODY = ctypes.c_ulong(-1)


def main() -> None:
    launcher_pid, command = int(sys.argv[1]), sys.argv[2:]
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    prctl(_PR_SET_PTRACER, _ANYBODY, 0, 0, 0)
    # The launcher may have died before the line above took effect.
    if os.getppid() != launcher_pid:
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
