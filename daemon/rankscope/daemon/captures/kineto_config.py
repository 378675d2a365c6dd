"""The configuration text that libkineto gets. A bad value stops its parser in the middle, and what it has read by then
runs all the same: so every value is checked here, before anything is sent."""

from __future__ import annotations

import re
from typing import Final

from rankscope.daemon.captures.orders import SECONDS_LIMIT, CaptureError, Options

# libkineto of late writes nowhere else unless its environment names another directory.
DEFAULT_FOLDER: Final = "/tmp"
PATH_LIMIT: Final = 1024
_SAFE_PATH: Final = re.compile(r"(/[A-Za-z0-9._-]+)+")


def log_file(capture_id: str, rank: int, folder: str = "") -> str:
    """The path to ask for, as the training process sees it."""
    path = f"{(folder or DEFAULT_FOLDER).rstrip('/')}/rankscope-{capture_id}-rank{rank}.json"
    if not _is_safe(path):
        raise CaptureError(
            f"KINETO_ONDEMAND_TRACE_DIR={folder[:80]!r} of rank {rank} cannot be used for a trace; name a plain "
            "directory"
        )
    return path


def written_file(asked: str, pid: int) -> str:
    """What libkineto makes of the path: the pid is the one that the process itself knows."""
    return f"{asked.removesuffix('.json')}_{pid}.json"


def configuration(path: str, start_unix_millis: int, seconds: float, options: Options) -> str:
    if not 0.001 <= seconds <= SECONDS_LIMIT + 1 or start_unix_millis <= 0 or not _is_safe(path):
        raise ValueError(f"not fit to be sent: {path!r}, start {start_unix_millis}, {seconds} s")
    lines = {
        "ACTIVITIES_LOG_FILE": path,
        "PROFILE_START_TIME": str(start_unix_millis),
        "ACTIVITIES_DURATION_MSECS": str(round(seconds * 1000)),
        # It prepares up to a second before the start anyway; more would only delay it.
        "ACTIVITIES_WARMUP_PERIOD_SECS": "0",
        "PROFILE_REPORT_INPUT_SHAPES": _flag(options.shapes),
        "PROFILE_WITH_STACK": _flag(options.stacks),
        "PROFILE_WITH_FLOPS": _flag(options.flops),
        "PROFILE_WITH_MODULES": _flag(options.modules),
        "PROFILE_PROFILE_MEMORY": _flag(options.memory),
    }
    return "".join(f"{key}={value}\n" for key, value in lines.items())


def _is_safe(path: str) -> bool:
    return len(path) <= PATH_LIMIT and bool(_SAFE_PATH.fullmatch(path)) and not {".", ".."} & set(path.split("/"))


def _flag(value: bool) -> str:
    return "true" if value else "false"
