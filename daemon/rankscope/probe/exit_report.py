"""Reports the exception that ended a process, for the card of `rankscope run`.

Python keeps an exception that nothing caught in `sys.last_value`, whatever sys.excepthook does with it. Nothing is
hooked: the exception is read when the interpreter exits. A process that ends by `os._exit` or a signal writes none."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from typing import Any, Dict, List

# The folder for reports.
FOLDER = "RANKSCOPE_EXIT_REPORTS"
MAX_FRAMES = 64
MAX_TEXT = 16384  # an exception may quote the traceback of another process


def install() -> None:
    """Call before other modules register functions: this one runs after theirs."""
    folder = os.environ.get(FOLDER)
    if folder:
        atexit.register(_write, folder, os.getpid())


def _write(folder: str, pid: int) -> None:
    error = getattr(sys, "last_value", None)
    # A fork that did not exec runs the functions of its parent.
    if not isinstance(error, BaseException) or os.getpid() != pid:
        return
    with contextlib.suppress(Exception):
        import json  # every Python process of the command imports this module, and few write a report

        path = os.path.join(folder, "{}.json".format(pid))
        with open(path + ".new", "w", encoding="utf-8", errors="replace") as file:
            json.dump(_report(error), file)
        os.replace(path + ".new", path)


def _report(error: BaseException) -> Dict[str, Any]:
    text = str(error)
    cause = error.__cause__
    if cause is not None and type(cause).__name__.endswith("RemoteTraceback"):
        text = "{}\n{}".format(text, cause)  # of a process pool: the traceback in the other process
    return {
        "rank": os.environ.get("RANK"),
        "unix_seconds": time.time(),
        "type": type(error).__name__,
        "text": text[-MAX_TEXT:] if "Traceback" in text else text[:MAX_TEXT],
        "frames": _frames(error),
    }


def _frames(error: BaseException) -> List[Dict[str, Any]]:
    """The innermost last, as a traceback has them."""
    frames = []
    step = error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        frames.append({"file": code.co_filename, "line": step.tb_lineno, "function": code.co_name})
        step = step.tb_next
    if isinstance(error, SyntaxError) and error.filename:
        frames.append({"file": error.filename, "line": error.lineno or 0, "function": "<module>"})
    return frames[-MAX_FRAMES:]
