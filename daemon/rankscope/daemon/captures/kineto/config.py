"""The configuration text for libkineto, and the start times that it keeps.

A bad value stops libkineto's parser in the middle, and the part that it has read takes effect: every value is
checked here before anything is sent."""

from __future__ import annotations

import re
import threading
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from rankscope.daemon.captures.orders import MAX_RECORDING_SECONDS, CaptureError, Options

# Recent versions of libkineto write nowhere else unless their environment names another directory.
DEFAULT_FOLDER: Final = "/tmp"
MAX_PATH_CHARACTERS: Final = 1024
_SAFE_PATH: Final = re.compile(r"(/[A-Za-z0-9._-]+)+")
LOOK_SECONDS: Final = 1.0
# How late a wake-up may be on a busy machine; 0.1 s were seen.
SAFE_SECONDS: Final = 0.2
# Between sending a configuration and its start: one wake-up must fit in between, and may be late.
LEAD_SECONDS: Final = LOOK_SECONDS + SAFE_SECONDS + 0.05
_BEFORE_LOOK_SECONDS: Final = 0.01
# A common start is delayed by at most this much to suit all ranks.
_LATITUDE_SECONDS: Final = 0.6
_COMFORTABLE_SECONDS: Final = 0.35
_STEP_SECONDS: Final = 0.02
_MAX_PROCESSES: Final = 4096


def log_file(capture_id: str, rank: int, folder: str = "") -> str:
    """The path to request, as the training process sees it."""
    path = f"{(folder or DEFAULT_FOLDER).rstrip('/')}/rankscope-{capture_id}-rank{rank}.json"
    if not _is_safe(path):
        raise CaptureError(
            f"KINETO_ONDEMAND_TRACE_DIR={folder[:80]!r} of rank {rank} cannot be used for a trace; name a plain "
            "directory"
        )
    return path


def written_file(asked: str, pid: int) -> str:
    """The path that libkineto writes: it adds the pid as the process itself sees it."""
    return f"{asked.removesuffix('.json')}_{pid}.json"


def configuration(path: str, start_unix_millis: int, seconds: float, options: Options) -> str:
    if not 0.001 <= seconds <= MAX_RECORDING_SECONDS + 1 or start_unix_millis <= 0 or not _is_safe(path):
        raise ValueError(f"not fit to be sent: {path!r}, start {start_unix_millis}, {seconds} s")
    lines = {
        "ACTIVITIES_LOG_FILE": path,
        "PROFILE_START_TIME": str(start_unix_millis),
        "ACTIVITIES_DURATION_MSECS": str(round(seconds * 1000)),
        # libkineto prepares up to a second before the start anyway; more would only delay it.
        "ACTIVITIES_WARMUP_PERIOD_SECS": "0",
        "PROFILE_REPORT_INPUT_SHAPES": _flag(options.shapes),
        "PROFILE_WITH_STACK": _flag(options.stacks),
        "PROFILE_WITH_FLOPS": _flag(options.flops),
        "PROFILE_WITH_MODULES": _flag(options.modules),
        "PROFILE_PROFILE_MEMORY": _flag(options.memory),
    }
    return "".join(f"{key}={value}\n" for key, value in lines.items())


def _is_safe(path: str) -> bool:
    return (
        len(path) <= MAX_PATH_CHARACTERS and bool(_SAFE_PATH.fullmatch(path)) and not {".", ".."} & set(path.split("/"))
    )


def _flag(value: bool) -> str:
    return "true" if value else "false"


# Which start times libkineto keeps.
#
# Its profiler thread wakes once a second. It accepts a request at the second-last wake-up before the start, and refuses
# it if that wake-up comes after the start. A start shortly after a wake-up is therefore lost if the thread is slightly
# late (seen: "start timestamp is in the past", 0 ms); a start shortly before a wake-up is safe by almost a second. A
# warm-up period does not help: it moves the border, not the distance to it. The wake-ups are known: the thread starts
# with the first request, and realigns with the end of each recording. All times here are unix seconds.


def slack_seconds(start: float, look: float) -> float:
    """How late the decisive wake-up may be; `look` is the time of any wake-up."""
    return (start - look) % LOOK_SECONDS


def safe_start(start: float, look: float) -> float:
    """The start, or slightly earlier if it would be at risk."""
    slack = slack_seconds(start, look)
    return start if slack >= SAFE_SECONDS else start - slack - _BEFORE_LOOK_SECONDS


def common_start(earliest: float, looks: Collection[float]) -> float:
    """A start soon after the earliest that is as far as possible from all wake-ups."""
    candidates = [earliest + step * _STEP_SECONDS for step in range(round(_LATITUDE_SECONDS / _STEP_SECONDS) + 1)]

    def comfort(start: float) -> float:
        return min((slack_seconds(start, look) for look in looks), default=LOOK_SECONDS)

    return next((start for start in candidates if comfort(start) >= _COMFORTABLE_SECONDS), max(candidates, key=comfort))


@dataclass(frozen=True)
class _Past:
    look: float | None
    busy_until: float


class Pasts:
    """What is known of each process (pid and start time) from the configurations it received. Thread-safe."""

    def __init__(self) -> None:
        self._pasts: dict[tuple[int, int], _Past] = {}
        self._lock = threading.Lock()

    def look(self, process: tuple[int, int], handed_at: float) -> float | None:
        """A wake-up of its profiler thread, which starts with the first configuration; None: unknown."""
        with self._lock:
            past = self._pasts.get(process)
            return handed_at if past is None else past.look

    def busy_until(self, process: tuple[int, int]) -> float:
        """A process follows the configuration it has, wanted or not, and ignores any other meanwhile."""
        with self._lock:
            past = self._pasts.get(process)
            return 0.0 if past is None else past.busy_until

    def handed(self, process: tuple[int, int], look: float | None, end: float) -> None:
        with self._lock:
            if len(self._pasts) >= _MAX_PROCESSES:
                self._pasts.pop(next(iter(self._pasts)))
            self._pasts[process] = _Past(look, end)

    def recorded(self, process: tuple[int, int], end: float) -> None:
        with self._lock:
            self._pasts[process] = _Past(end, 0.0)

    def refused(self, process: tuple[int, int]) -> None:
        """Nothing was recorded: it did not start, or was interrupted, which moves the wake-ups."""
        with self._lock:
            self._pasts[process] = _Past(None, 0.0)
