"""`rankscope run -- COMMAND`: runs a training command, watches its ranks, and ends with a verdict card.

The command keeps the terminal, its output and its exit status. The card goes to stderr."""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from rankscope.analysis.stats.step_time_comparison import StepTimes
from rankscope.analysis.verdicts.verdict import Kind, gist, headline, loss
from rankscope.cli.demo_job.environment import probe_environment
from rankscope.cli.job_summary import JobSummary
from rankscope.cli.job_tables import MARKS
from rankscope.cli.messages import Exit, refuse, to_stderr
from rankscope.cli.options import add_options, add_output_argument
from rankscope.cli.output_file import check_writable, keep_output
from rankscope.cli.process_ends import ProcessEnds
from rankscope.cli.run_card import as_html, card, to_json
from rankscope.cli.run_end import CommandEnd, read_exit_reports
from rankscope.cli.server_notes import announced
from rankscope.cli.slow_capture import SlowCapture, default_folder
from rankscope.cli.standalone import COMMAND_VARIABLE, Standalone, private_config
from rankscope.cli.terminal import Terminal
from rankscope.daemon.server.sockets import ListenError
from rankscope.daemon.windows.broadcast import Tick
from rankscope.operator.correlation.correlator import JobState
from rankscope.probe import exit_report

log = logging.getLogger(__name__)

HANDLER_DELAY_SECONDS = 0.5  # at most
# The terminal sends these to the command itself.
_FROM_TERMINAL = (signal.SIGINT, signal.SIGQUIT)
_ENDING = (*_FROM_TERMINAL, signal.SIGTERM, signal.SIGHUP)
_FORWARDED = (*_FROM_TERMINAL, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# What a finding that changes its line all the time may print.
LINES_PER_JOB = 20
# As shells report a command that cannot be started.
NOT_FOUND, NOT_EXECUTABLE = 127, 126

_EPILOG = """\
examples:
  rankscope run -- torchrun --nproc-per-node 8 train.py
  rankscope run --summary after.json -- torchrun --nproc-per-node 8 train.py
  rankscope run --capture-when-slow -o traces/ -- torchrun --nproc-per-node 8 train.py
  rankscope compare before.json after.json --max-regression 5%

The command's output, signals and exit status pass through unchanged. A line appears on stderr when the verdict
changes, and a card at the end. While it runs, `rankscope top` in another terminal shows the ranks, and `rankscope
capture` records them.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.usage = "%(prog)s [options] -- COMMAND"
    parser.add_argument(
        "--summary", type=Path, metavar="FILE", help="write what was measured as JSON, for `rankscope compare`"
    )
    add_options(parser, "--html")
    parser.add_argument(
        "--capture-when-slow",
        action="store_true",
        help="capture the slow rank and a peer once, when an alarm stands (docs/captures.md)",
    )
    add_output_argument(parser, "DIR", "download that capture into this directory (default: rankscope-capture-TIME)")
    parser.add_argument("--quiet", action="store_true", help="print the card only")
    parser.add_argument("--no-probe", action="store_true", help="do not load the probe; stacks and counters only")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what to run, with arguments")


def run(arguments: argparse.Namespace) -> int:
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        return refuse("no command; next step: rankscope run -- torchrun --nproc-per-node 8 train.py")
    logging.basicConfig(level=logging.ERROR)
    for option, path in (("--summary", arguments.summary), ("--html", arguments.html)):
        if path is not None:
            check_writable(option, path)
    status: int | None = None
    slow_capture: SlowCapture | None = None
    try:
        with ExitStack() as stack:
            private = tempfile.TemporaryDirectory(prefix="rankscope-run-", ignore_cleanup_errors=True)
            folder = stack.enter_context(private)
            running = Command(command, Path(folder), probe=not arguments.no_probe)
            watch = CommandWatch(running, quiet=arguments.quiet)
            standalone = Standalone(private_config(folder), command_mark=running.mark)
            standalone.correlator.listen(watch)
            standalone.on_tick(watch.take_steps)
            if arguments.capture_when_slow:
                folder_of_capture = arguments.output or default_folder()
                slow_capture = SlowCapture(lambda: standalone.addresses.grpc_targets[0], folder_of_capture)
                standalone.correlator.listen(slow_capture)
            try:
                stack.enter_context(standalone)
            except ListenError as error:
                return refuse(str(error), Exit.FAILED)
            if slow_capture is not None:
                stack.enter_context(slow_capture)
            stack.enter_context(announced(standalone.addresses.grpc_targets, shlex.join(command)))
            if not arguments.quiet:
                target = standalone.addresses.grpc_targets[0]
                to_stderr(f"rankscope: watching; in another terminal: rankscope top --connect {target}")
            try:
                end = running.run()
            except OSError as error:
                to_stderr(f"error: {command[0]}: {error.strerror}; is it installed, and on the PATH?")
                return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
            status = end.status
        _show_and_write(arguments, command, watch.jobs, end)
        if slow_capture is not None:
            to_stderr(f"capture  {slow_capture.line}")
    except Exception:
        if status is None:
            raise
        log.exception("the command ended with status %d, which is kept; the card is not complete", status)
    return status if status >= 0 else _end_like(-status)


def _show_and_write(
    arguments: argparse.Namespace, command: Sequence[str], jobs: list[JobSummary], end: CommandEnd
) -> None:
    console, probe = Terminal(stderr=True), not arguments.no_probe
    console.print(card(jobs, end, probe=probe, columns=console.columns))
    # The exit status is the command's, whatever happens to these.
    if arguments.summary is not None:
        keep_output("--summary", arguments.summary, json.dumps(to_json(jobs, command, end)) + "\n")
    if arguments.html is not None:
        keep_output("--html", arguments.html, as_html(jobs, end, probe=probe))


class Command:
    """The training command: runs once, by `run`. `ends` shows how its ranks ended."""

    def __init__(self, words: Sequence[str], folder: Path, *, probe: bool) -> None:
        """`folder` is private: the processes of the command leave reports in it."""
        self.mark = uuid.uuid4().hex
        self.ends = ProcessEnds()
        self._words = words
        self._reports = folder / "exit-reports"
        self._probe = probe
        self._signals: list[tuple[float, int]] = []  # that end commands, with the time

    @property
    def interrupted_unix_seconds(self) -> float | None:
        return self._signals[0][0] if self._signals else None

    def run(self) -> CommandEnd:
        """Returns when the command has ended. Raises OSError if it cannot be started."""
        self._reports.mkdir(mode=0o700)
        environment = {**os.environ, COMMAND_VARIABLE: self.mark, exit_report.FOLDER: str(self._reports)}
        if self._probe:
            environment.update(probe_environment())
        began = time.time()
        pid, status = self._wait(environment)
        self.ends.stop()
        moment, number = self._signals[0] if self._signals else (None, 0)
        reports = read_exit_reports(self._reports)
        return CommandEnd(pid, status, began, time.time(), moment, number, self.ends.ends, reports)

    def _wait(self, environment: Mapping[str, str]) -> tuple[int, int]:
        pending: list[int] = []
        with _handled(lambda number, _: pending.append(number)):
            process = subprocess.Popen(self._words, env=environment)
            with _handled(lambda number, _: self._forward(process, number)):
                for number in pending:
                    self._forward(process, number)
                # A signal that another thread takes, or that comes just before the main thread begins to wait, does
                # not interrupt the wait: Python calls the handler when it ends.
                waiting = threading.Thread(target=process.wait, name="rankscope-command", daemon=True)
                waiting.start()
                while waiting.is_alive():
                    waiting.join(HANDLER_DELAY_SECONDS)
                return process.pid, process.returncode

    def _forward(self, process: subprocess.Popen[bytes], number: int) -> None:
        if number in _ENDING:
            self._signals.append((time.time(), number))
        if number not in _FROM_TERMINAL or not _is_in_foreground():
            process.send_signal(number)


def _is_in_foreground() -> bool:
    try:
        with Path("/dev/tty").open() as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    # A shell starts background commands with SIGINT ignored, and the command inherits that.
    numbers = [number for number in _FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _end_like(number: int) -> int:
    """End by the signal that ended the command: the caller sees the same status."""
    sys.stdout.flush()
    sys.stderr.flush()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number


class CommandWatch:
    """A listener of the correlator: sums up the jobs of one command, and prints a line when a verdict changes."""

    def __init__(self, command: Command, quiet: bool) -> None:
        self._command = command
        self._quiet = quiet
        self._summaries: dict[str, JobSummary] = {}
        self._times: dict[str, StepTimes] = {}
        self._timed_rank: dict[str, int] = {}
        self._shown: dict[str, list[str]] = {}  # by job, the gists printed since it was last healthy

    @property
    def jobs(self) -> list[JobSummary]:
        """The largest first: a command may start several jobs, one after the other."""
        return sorted(self._summaries.values(), key=lambda job: (-job.ranks, -job.steps))

    def __call__(self, states: tuple[JobState, ...]) -> None:
        for state in states:
            summary = self._summaries.get(state.job)
            if summary is None:
                times = self._times.setdefault(state.job, StepTimes())
                summary = self._summaries[state.job] = JobSummary(state.job, times)
            summary.meet(state)
            self._command.ends.watch(summary.pids)
            if self._is_evidence(state, summary) and summary.add(state) and not self._quiet:
                self._show(state)

    def _is_evidence(self, state: JobState, summary: JobSummary) -> bool:
        """What ranks do while the job ends, or while their peers die, shows nothing of the training. A rank may hang
        because another one died; that is no news while a hang stands already."""
        interrupted = self._command.interrupted_unix_seconds
        if interrupted is not None and state.evaluated_unix_seconds > interrupted:
            return False
        ends = self._command.ends.ends
        first = min((ends[pid].unix_seconds for pid in summary.pids if pid in ends), default=None)
        if first is None or state.window_end_unix_seconds <= first:
            return True
        return state.verdict.kind is Kind.HANG and not any(
            finding.verdict.kind is Kind.HANG for finding in summary.findings
        )

    def take_steps(self, tick: Tick) -> None:
        """Keep the steps of each job's lowest rank. In synchronous training all ranks have the same."""
        for key, step_seconds in tick.step_seconds.items():
            job, rank = tick.windows[key].identity.job, tick.windows[key].identity.rank
            times = self._times.setdefault(job, StepTimes())
            if rank < self._timed_rank.setdefault(job, rank):
                self._timed_rank[job] = rank
                times.clear()
            if rank == self._timed_rank[job]:
                times.add(step_seconds)

    def _show(self, state: JobState) -> None:
        """Once for a finding, and once more for each line that is found to cause it, whatever its figures."""
        verdict, shown = state.verdict, self._shown.setdefault(state.job, [])
        found = gist(verdict)
        if found in shown or (not verdict.kind.is_finding and not shown) or len(shown) >= LINES_PER_JOB:
            return
        if not verdict.kind.is_finding:
            shown.clear()  # a finding that comes back is shown again
        shown.append(found)
        lost = loss(verdict)
        line = f"{MARKS[verdict.severity]} {headline(verdict)}{f'; {lost}' if lost else ''}"
        to_stderr(f"rankscope: {time.strftime('%H:%M:%S')} {line}")
