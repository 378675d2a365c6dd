"""How a command ended: its exit status, the rank that failed first, and the exception or the signal that ended it.

The probe reports an exception that nothing caught (`rankscope.probe.exit_report`), with its frames. pidfds show when
the ranks end, and by what. The first failure counts: launchers and peers end because of it."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path, PurePath
from typing import Any, Final

from rankscope.analysis.profiles.frames import Frame, is_user_code
from rankscope.cli.process_ends import ProcessEnd
from rankscope.common.text import one_line, printable

MAX_REPORTS: Final = 4096
MAX_REPORT_BYTES: Final = 1 << 18
MAX_TEXT: Final = 160
# Exceptions that report how a process was ended rather than what went wrong in it.
_INTERRUPTIONS: Final = ("KeyboardInterrupt", "SystemExit", "SignalException")
_NESTED: Final = "Traceback (most recent call last)"
_NESTED_FRAME: Final = re.compile(r'^\s*File "([^"\n]+)", line (\d{1,9}), in (\S+)', re.MULTILINE)
# What a rank raises when a peer is gone, and a launcher when a rank is. A rank closes its connections before it ends.
_PEER_IS_GONE: Final = re.compile(
    r"connection (closed|reset) by (remote )?peer|broken pipe|remote process exited|communicator was aborted"
    r"|DistNetworkError|DistBackendError|ChildFailedError|ProcessExitedException",
    re.IGNORECASE,
)
MAX_PEER_SECONDS: Final = 10.0
_CRASHES: Final = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


@dataclass(frozen=True)
class Raised:
    """An exception that nothing caught."""

    text: str  # `ValueError: bad sample`
    frame: Frame | None  # the innermost in the user's own code, if there is one

    @property
    def place(self) -> str:
        frame = self.frame
        return "" if frame is None else f"{PurePath(frame.file).name}:{frame.line} ({frame.function})"


@dataclass(frozen=True)
class ExitReport:
    """What the probe of a process reported."""

    pid: int
    rank: int | None
    unix_seconds: float
    raised: Raised
    is_nested: bool  # it quotes the exception of another process
    is_interruption: bool


@dataclass(frozen=True)
class Failure:
    rank: int | None  # None: a process that is no rank, as far as is known
    unix_seconds: float
    status: int | None
    memory: str
    raised: Raised | None

    def __str__(self) -> str:
        who = "the command" if self.rank is None else f"rank {self.rank}"
        if self.raised is not None:
            what = f"{who} raised {self.raised.text}"
            return f"{what.rstrip('.')}, at {self.raised.place}" if self.raised.place else what
        if self.status is None:
            return f"{who} ended first"
        if self.status >= 0:
            return f"{who} exited with status {self.status}"
        if self.memory:
            return f"{who} was killed: {self.memory}"
        crashed = -self.status in _CRASHES
        return f"{who} {'crashed with' if crashed else 'was ended by'} {signal_name(-self.status)}"

    @property
    def is_consequence(self) -> bool:
        """Whether another process' end may be the reason: it lost a peer, or a launcher ended it."""
        if self.raised is not None:
            return _PEER_IS_GONE.search(self.raised.text) is not None
        return self.status in (-signal.SIGTERM, -signal.SIGINT)

    @property
    def advice(self) -> str:
        if self.raised is not None:
            return f"look at {self.raised.place}" if self.raised.place else "read the traceback above"
        if self.memory:
            return "raise the memory limit, or use less: fewer DataLoader workers, fewer copies of the data"
        if self.status is not None and -self.status in _CRASHES:
            return "run it again with PYTHONFAULTHANDLER=1: Python then prints where it crashed"
        if self.status == -signal.SIGABRT:
            return "read the last lines of its output: a library gave up; PYTHONFAULTHANDLER=1 prints where"
        if self.status is not None and self.status < 0:
            return "look for who sent the signal: a scheduler's time or memory limit, a person, `dmesg`"
        return "read the last lines of its output"


@dataclass(frozen=True)
class CommandEnd:
    """`ends` has the processes that were watched, `reports` those that reported an exception, both by pid."""

    pid: int
    status: int  # the exit status, or minus the signal
    began_unix_seconds: float
    ended_unix_seconds: float
    interrupted_unix_seconds: float | None = None  # when this command got a signal that ends commands
    interrupted_by: int = 0
    ends: Mapping[int, ProcessEnd] = field(default_factory=dict)
    reports: Mapping[int, ExitReport] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.ended_unix_seconds - self.began_unix_seconds

    @property
    def is_interrupted(self) -> bool:
        """By the user, before anything failed."""
        if self.interrupted_unix_seconds is None:
            return False
        failures = self._failures([*self.ends, *self.reports], {})
        return not failures or failures[0].unix_seconds >= self.interrupted_unix_seconds

    def failure(self, ranks: Mapping[int, int]) -> Failure | None:
        """The first failure of a job; `ranks` has its ranks by pid. None if the job did not fail."""
        if self.is_interrupted or self.status == 0:
            return None
        first = self._first(ranks, ranks)
        if first is None and ranks and all(pid in self.ends and self.ends[pid].status == 0 for pid in ranks):
            return None
        return first or self.failure_of_command()

    def failure_of_command(self) -> Failure | None:
        """Without a rank to blame."""
        if self.is_interrupted or self.status == 0:
            return None
        first = self._first([*self.reports, *self.ends], {})
        return first or Failure(None, self.ended_unix_seconds, self.status, "", None)

    def _failures(self, pids: Collection[int], ranks: Mapping[int, int]) -> list[Failure]:
        """In the order of time."""
        failures = [failure for pid in pids if (failure := self._failure_of(pid, ranks)) is not None]
        return sorted(failures, key=lambda failure: failure.unix_seconds)

    def _first(self, pids: Collection[int], ranks: Mapping[int, int]) -> Failure | None:
        failures = self._failures(pids, ranks)
        if not failures:
            return None
        last_seconds = failures[0].unix_seconds + MAX_PEER_SECONDS
        origins = [f for f in failures if not f.is_consequence and f.unix_seconds <= last_seconds]
        return (origins or failures)[0]

    def _failure_of(self, pid: int, ranks: Mapping[int, int]) -> Failure | None:
        end, report = self.ends.get(pid), self.reports.get(pid)
        status = self.status if pid == self.pid else None if end is None else end.status
        if report is not None and (report.is_interruption or status == 0):
            report = None
        if not status and report is None:
            return None
        rank = ranks.get(pid, None if report is None else report.rank)
        moments = [one.unix_seconds for one in (end, report) if one is not None] or [self.ended_unix_seconds]
        raised = None if report is None else report.raised
        if raised is None and status is not None and status > 0:
            raised = self._raised_elsewhere(pid)
        return Failure(rank, min(moments), status, "" if end is None else end.memory, raised)

    def _raised_elsewhere(self, pid: int) -> Raised | None:
        """A child of multiprocessing hands its exception to its parent, which raises it with the child's traceback."""
        quoted = [report for report in self.reports.values() if report.is_nested and report.pid != pid]
        return min(quoted, key=lambda report: report.unix_seconds).raised if quoted else None

    def __str__(self) -> str:
        """How the command ended; empty if it ended well."""
        if self.is_interrupted:
            by = "Ctrl-C" if self.interrupted_by == signal.SIGINT else signal_name(self.interrupted_by)
            return f"interrupted by {by} after {clock(self.seconds)}"
        if self.status == 0:
            return ""
        how = f"with exit status {self.status}" if self.status > 0 else f"by {signal_name(-self.status)}"
        return f"{how} after {clock(self.seconds)}"


def clock(seconds: float) -> str:
    """`0:07`, `12:30`, `1:00:05`"""
    whole = max(0, int(seconds))
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def read_exit_reports(folder: Path) -> dict[int, ExitReport]:
    """A report that is not as the probe writes it is left out: any process of the command may write there."""
    reports = {}
    for path in islice(sorted(folder.glob("*.json")), MAX_REPORTS):
        try:
            report = _report(int(path.stem), json.loads(_read(path)))
        except (OSError, ValueError, TypeError, KeyError, RecursionError, OverflowError):
            continue
        reports[report.pid] = report
    return reports


def _read(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        return file.read(MAX_REPORT_BYTES)


def _report(pid: int, document: Any) -> ExitReport:
    kind, text, rank = one_line(str(document["type"]), MAX_TEXT), str(document["text"]), document["rank"]
    steps = [(f["function"], f["file"], f["line"]) for f in document["frames"]]
    nested = text.rpartition(_NESTED)[2] if _NESTED in text else ""
    lines = [line.strip() for line in (nested or text).splitlines() if line.strip(' "')]
    if nested:
        steps += [(function, file, line) for file, line, function in _NESTED_FRAME.findall(nested)]
        summary = lines[-1]
    else:
        summary = f"{kind}: {lines[0]}" if lines else kind
    frames = [Frame(one_line(str(f), MAX_TEXT), printable(str(file)), int(line)) for f, file, line in steps]
    own = [frame for frame in frames if is_user_code(frame)]
    innermost = own[-1] if own else frames[-1] if frames else None
    return ExitReport(
        pid,
        int(rank) if isinstance(rank, str) and rank.isdecimal() and len(rank) < 9 else None,
        float(document["unix_seconds"]),
        Raised(one_line(summary, MAX_TEXT), innermost),
        bool(nested),
        kind in _INTERRUPTIONS,
    )
