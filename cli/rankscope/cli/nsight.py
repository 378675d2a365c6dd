"""`rankscope capture --nsight`: starts and stops the recording of an nsys session that the job was launched in.

nsys cannot attach to a running process. A job launched by `nsys launch` can be recorded at any time, by `nsys start`
and `nsys stop`. Here the caller's own nsys is called with the caller's own rights; the daemon only says where the ranks
are, and calls no program of a job."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import grpc

from rankscope.analysis.verdicts.verdict import ranks as ranks_text
from rankscope.cli.connection import CALL_SECONDS
from rankscope.cli.messages import CommandError, Exit, to_stderr, to_stdout
from rankscope.cli.options import selected_ranks
from rankscope.cli.profile_client import one_run
from rankscope.common.text import one_line
from rankscope.daemon import procfs
from rankscope.daemon.captures.orders import MAX_RECORDING_SECONDS
from rankscope.v1.rank_service_pb2 import ListRanksRequest
from rankscope.v1.rank_service_pb2_grpc import RankServiceStub
from rankscope.v1.window_pb2 import RankWindow

# What nsys sets in the processes that it launches.
SESSION_VARIABLE: Final = "NSYS_PROFILING_SESSION_ID"
MAX_START_SECONDS: Final = 60.0
MAX_STOP_SECONDS: Final = 600.0  # it writes the report
MAX_TEXT_CHARACTERS: Final = 300
NAMESPACES: Final = ("mnt", "pid", "ipc", "user")
SUFFIXES: Final = (".nsys-rep", ".qdstrm")
LAUNCHED: Final = "Launched"
_LAUNCH = "start the job with `nsys launch --session-new=train torchrun …`"
_ID = re.compile("[1-9][0-9]{0,9}")
# ID, time, state, launched processes, name
_ROW = re.compile(r"\s*(\d+)\s+\S+\s+(\S.*?)\s+\d+\s+\S")


def record(channel: grpc.Channel, target: str, arguments: argparse.Namespace) -> int:
    """Records the sessions of the chosen ranks, all at the same time."""
    if not target.startswith("unix:"):
        raise CommandError(
            f"--nsight calls nsys on the machine of the job, and {target} is a network address; run it there with that "
            "machine's daemon, or in the job's container: nsys start --session=NAME, then nsys stop --session=NAME"
        )
    windows = _windows(channel, arguments)
    seconds = _seconds(arguments, windows)
    sessions: dict[str, list[int]] = {}
    for window in windows:
        sessions.setdefault(_session_of(window), []).append(window.identity.rank)
    nsys = _Nsys()
    nsys.check(sessions)
    folder = (arguments.output or Path()).resolve()
    begun = time.strftime("%Y%m%d-%H%M%S")
    paths = {session: folder / f"rankscope-{begun}-session{session}" for session in sessions}
    is_interrupted = False
    with nsys.recording(paths):
        for session, numbers in sessions.items():
            to_stderr(f"recording {ranks_text(numbers)} (nsys session {session}) for {seconds:.3g} s")
        try:
            time.sleep(seconds)
        except KeyboardInterrupt:
            is_interrupted = True
            to_stderr("interrupted; the recording ends now")
    reports = {session: _report(path) for session, path in paths.items()}
    if arguments.json:
        made = [
            {"session": session, "ranks": sessions[session], "report": str(report)}
            for session, report in reports.items()
        ]
        to_stdout(json.dumps({"run": windows[0].identity.job, "seconds": seconds, "nsight": made}))
    else:
        for session, report in reports.items():
            to_stdout(f"{ranks_text(sessions[session])}: {report}; next: open it in Nsight Systems")
    return Exit.INTERRUPTED if is_interrupted else Exit.OK


def _windows(channel: grpc.Channel, arguments: argparse.Namespace) -> list[RankWindow]:
    """The latest of each chosen rank."""
    wanted = frozenset(selected_ranks(arguments))
    found = RankServiceStub(channel).ListRanks(ListRanksRequest(), timeout=CALL_SECONDS).ranks
    job = one_run(arguments.run, (rank.identity.job for rank in found))
    here = {rank.identity.rank: rank for rank in found if rank.identity.job == job}
    missing = sorted(wanted - here.keys())
    if missing:
        raise CommandError(f"{ranks_text(missing)} of {job!r} not seen on this machine", Exit.NOT_FOUND)
    windows = []
    for number in sorted(wanted or here):
        window = here[number].latest
        window.identity.CopyFrom(here[number].identity)
        windows.append(window)
    return windows


def _seconds(arguments: argparse.Namespace, windows: Sequence[RankWindow]) -> float:
    """nsys knows no steps: the time that so many take now."""
    seconds: float | None = arguments.seconds
    if seconds is None:
        step_seconds = max(window.step_seconds.p50 for window in windows)
        if not step_seconds > 0:
            raise CommandError("how long a step takes is not known yet; say --seconds S", Exit.REFUSED)
        seconds = max(arguments.steps, 1) * step_seconds
    if not 0.05 <= seconds <= MAX_RECORDING_SECONDS:
        raise CommandError(f"{seconds:.3g} seconds: a capture takes 0.05 to {MAX_RECORDING_SECONDS:g}; say --seconds S")
    return seconds


def _session_of(window: RankWindow) -> str:
    """Of a process of the caller's own, outside of containers: nsys of one user must not read what a program of
    another user or container wrote."""
    rank, pid = window.identity.rank, window.identity.pid
    process = f"/proc/{pid}"
    try:
        if procfs.read_stat(process).start_ticks != window.identity.incarnation:
            raise FileNotFoundError
        if Path(process).stat().st_uid != os.geteuid():
            raise PermissionError
        if any(
            procfs.namespace_inode(process, kind) != procfs.namespace_inode("/proc/self", kind) for kind in NAMESPACES
        ):
            raise CommandError(
                f"rank {rank} (pid {pid}) runs in a container, and nsys must run there; next, inside of it: "
                "nsys sessions list, nsys start --session=NAME, nsys stop --session=NAME",
                Exit.REFUSED,
            )
        session = procfs.Environment(process).get(SESSION_VARIABLE)
    except PermissionError as error:
        text = f"rank {rank} (pid {pid}) belongs to another user; run this as that user, with a daemon of that user"
        raise CommandError(text, Exit.REFUSED) from error
    except (FileNotFoundError, ProcessLookupError) as error:
        raise CommandError(f"rank {rank} (pid {pid}) has ended; ask again", Exit.REFUSED) from error
    if session is None or _ID.fullmatch(session) is None:
        raise CommandError(
            f"rank {rank} (pid {pid}) was not started under nsys, which cannot attach to a running process; {_LAUNCH} "
            "and ask again, or capture without --nsight",
            Exit.REFUSED,
        )
    return session


def _report(path: Path) -> Path:
    for suffix in SUFFIXES:
        found = path.with_name(path.name + suffix)
        if found.exists():
            return found
    raise CommandError(
        f"nsys wrote no report {path}{SUFFIXES[0]}; is its folder writable, and its disk full?", Exit.FAILED
    )


class _Nsys:
    """The nsys of the caller's PATH."""

    def __init__(self) -> None:
        program = shutil.which("nsys")
        if program is None:
            raise CommandError("nsys is not installed here; put it into PATH, or capture without --nsight")
        self._program = program

    def check(self, sessions: Mapping[str, Sequence[int]]) -> None:
        """`nsys start` with a session that is gone would begin another."""
        rows = map(_ROW.match, self._call(MAX_START_SECONDS, "sessions", "list").splitlines())
        states = {row[1]: row[2] for row in rows if row is not None}
        for session, numbers in sessions.items():
            state = states.get(session)
            if state is None:
                text = f"nsys session {session} of {ranks_text(numbers)} is not known to {self._program}"
                raise CommandError(f"{text}; it has ended, or another nsys has launched the job", Exit.REFUSED)
            if state != LAUNCHED:
                text = f"nsys session {session} of {ranks_text(numbers)} is in the state {state!r}, not {LAUNCHED!r}"
                raise CommandError(f"{text}; end its recording by nsys stop --session={session}", Exit.REFUSED)

    @contextmanager
    def recording(self, paths: Mapping[str, Path]) -> Iterator[None]:
        """What may have been started is stopped, whatever happens."""
        started: dict[str, bool] = {}
        try:
            for session, path in paths.items():
                started[session] = False
                self._call(MAX_START_SECONDS, "start", f"--session={session}", f"--output={path}")
                started[session] = True
            yield
        finally:
            errors = []
            for session, is_sure in started.items():
                try:
                    self._call(MAX_STOP_SECONDS, "stop", f"--session={session}")
                except CommandError as error:
                    errors += [error] * is_sure
            if errors:
                raise errors[0]

    def _call(self, seconds: float, *words: str) -> str:
        command = [self._program, *words]
        shown = f"nsys {' '.join(words)}"
        try:
            # A session of its own: Ctrl-C ends the recording, not the nsys that stops it.
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=seconds,
                start_new_session=True,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise CommandError(
                f"`{shown}` has not ended after {seconds:g} s; next: nsys sessions list", Exit.FAILED
            ) from error
        except OSError as error:
            raise CommandError(f"{self._program}: {error.strerror}; put a working nsys into PATH") from error
        text = done.stdout.decode("utf-8", "replace")
        if done.returncode != 0:
            why = one_line(text, MAX_TEXT_CHARACTERS) or f"exit code {done.returncode}"
            raise CommandError(f"`{shown}` failed: {why}", Exit.FAILED)
        return text
