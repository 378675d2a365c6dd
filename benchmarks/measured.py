"""`python measured.py COMMAND …`: runs a command and prints, as the last line, its seconds and its peak memory.

The kernel counts the peak of a child from before it became the command, when it was still a copy of its parent; this
parent is small enough not to matter."""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    started = time.perf_counter()
    child = os.spawnv(os.P_NOWAIT, sys.argv[1], sys.argv[1:])
    _, status, usage = os.wait4(child, 0)
    print()
    print(
        json.dumps(
            {
                "seconds": time.perf_counter() - started,
                "cpu_seconds": usage.ru_utime + usage.ru_stime,
                "peak_bytes": usage.ru_maxrss * 1024,
                "status": os.waitstatus_to_exitcode(status),
            }
        )
    )


if __name__ == "__main__":
    main()
