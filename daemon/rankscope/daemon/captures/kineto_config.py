"""The configuration text that libkineto gets. A bad value stops its parser in the middle, and what it has read by then
runs all the same: so every value is checked here, before anything is sent."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from rankscope.daemon.captures.orders import SECONDS_LIMIT, CaptureError, Options

# Without it a busy process refuses a start that it wakes up for too late by a hair.
WARMUP_SECONDS = 1
# libkineto of late writes nowhere else unless its environment names another directory.
DEFAULT_FOLDER = "/tmp"
_SAFE_PATH = re.compile(r"(/[A-Za-z0-9._-]+)+")


def log_file(capture_id: str, rank: int, folder: str = "") -> str:
    """The path to ask for, as the training process sees it."""
    path = f"{(folder or DEFAULT_FOLDER).rstrip('/')}/rankscope-{capture_id}-rank{rank}.json"
    if not _SAFE_PATH.fullmatch(path) or ".." in PurePosixPath(path).parts:
        raise CaptureError(
            f"KINETO_ONDEMAND_TRACE_DIR={folder[:80]!r} of rank {rank} cannot be used for a trace; name a plain "
            "directory"
        )
    return path


def written_file(asked: str, pid: int) -> str:
    """What libkineto makes of the path: the pid is the one that the process itself knows."""
    return f"{asked.removesuffix('.json')}_{pid}.json"


def configuration(path: str, start_unix_millis: int, seconds: float, options: Options) -> str:
    millis = round(seconds * 1000)
    if not 1 <= millis <= SECONDS_LIMIT * 2000 or start_unix_millis <= 0 or not _SAFE_PATH.fullmatch(path):
        raise ValueError(f"not fit to be sent: {path!r}, start {start_unix_millis}, {millis} ms")
    lines = {
        "ACTIVITIES_LOG_FILE": path,
        "PROFILE_START_TIME": str(start_unix_millis),
        "ACTIVITIES_DURATION_MSECS": str(millis),
        "ACTIVITIES_WARMUP_PERIOD_SECS": str(WARMUP_SECONDS),
        "PROFILE_REPORT_INPUT_SHAPES": _flag(options.shapes),
        "PROFILE_WITH_STACK": _flag(options.stacks),
        "PROFILE_WITH_FLOPS": _flag(options.flops),
        "PROFILE_WITH_MODULES": _flag(options.modules),
        "PROFILE_PROFILE_MEMORY": _flag(options.memory),
    }
    return "".join(f"{key}={value}\n" for key, value in lines.items())


def _flag(value: bool) -> str:
    return "true" if value else "false"
