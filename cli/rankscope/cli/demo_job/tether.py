"""Becomes another program that the kernel ends when the launcher dies, however the launcher dies.

A program of its own rather than a `preexec_fn`: forking a launcher that has threads (gRPC's, say) is not safe.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
# Where Yama lets only ancestors read a process (Ubuntu's default), this lets an ordinary user's py-spy see the demo.
# Elsewhere the call fails, and need not matter.
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
