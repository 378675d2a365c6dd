"""`rankscope top`: runs and ranks of a server as a live table, with the verdict on top."""

from __future__ import annotations

import argparse
import itertools
import math
import os
import queue
import signal
import sys
import termios
import threading
import time
import tty
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import grpc
import msgspec
from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from rankscope.analysis.quantities import count
from rankscope.analysis.step_graph.step_breakdown import StepBreakdown, rows
from rankscope.analysis.verdicts.verdict import Kind, Verdict, accused, evidence, headline, loss, milliseconds
from rankscope.cli import options
from rankscope.cli.connection import CALL_SECONDS, connected
from rankscope.cli.contexts import add_connection_arguments
from rankscope.cli.job_tables import MARKS, MIN_PART_RATIO, rank_table, stale_nodes
from rankscope.cli.messages import CommandError, Exit, to_stdout
from rankscope.cli.terminal import Terminal
from rankscope.common.text import one_line
from rankscope.operator.console.answers import (
    TopAnswer,
    TopRank,
    TopRun,
    breakdown_answer,
    cpu_ratio,
    measured,
    run_fields,
    top_rank,
)
from rankscope.operator.correlation.correlator import JobState
from rankscope.operator.correlation.job_service import breakdown_of, is_wanted, state_of, verdict_of
from rankscope.v1 import job_service_pb2 as pb
from rankscope.v1.job_service_pb2_grpc import JobServiceStub
from rankscope.v1.rank_service_pb2 import ListRanksRequest
from rankscope.v1.rank_service_pb2_grpc import RankServiceStub
from rankscope.v1.window_pb2 import RankWindow

# A pipe has no width: its reader expects whole lines.
POLL_SECONDS = 2.0
NAME_CHARACTERS = 300
# Lines below and above a table of ranks: its header, how many ranks are left out, the keys.
OTHER_LINES = 3
EVIDENCE_CHARACTERS = 400
ALONE = "a daemon sees its own node only and gives no verdict; `rankscope up` and a correlator do"
KEYS = "q quit   s sort   ↑ ↓ (k j) choose a run   ? keys"
Jobs = Sequence[pb.JobStatus]
_EPILOG = """\
examples:
  rankscope top                                           this machine
  rankscope top --context prod --run team/                the runs of a namespace of a cluster
  rankscope top --run team/llama --ranks 0-7,12 --sort wait
  rankscope top --once --json | jq '.runs[].verdict.headline'

Red is the culprit; '–' was not measured. Keys: q quit, s sort, arrows or j and k choose a run, ? help.
Without a terminal, every refresh is printed as text, or with --json as one line.
"""


@dataclass(frozen=True)
class View:
    """What of the runs is shown, and how."""

    run: str = ""
    ranks: frozenset[int] | None = None  # None: all
    sort: str = "rank"
    rows: int = 32
    chosen: str = ""  # the run whose ranks are shown if there is room for one only
    shows_keys: bool = False


def _largest(read: Callable[[RankWindow], float | None]) -> Callable[[RankWindow], float]:
    """The largest first; what was not measured comes last."""
    return lambda window: math.inf if (value := read(window)) is None else -value


# Ranks with the same key keep their order.
SORTS: dict[str, Callable[[RankWindow], Any]] = {
    "rank": lambda window: 0,
    "node": lambda window: window.identity.node,
    "step": _largest(lambda window: measured(window, "step_seconds")),
    "self": _largest(lambda window: measured(window, "self_seconds")),
    "wait": _largest(lambda window: measured(window, "wait_seconds")),
    "input": _largest(lambda window: measured(window, "input_seconds")),
    # The smallest first: that is the bad one.
    "mfu": lambda window: math.inf if (ratio := measured(window, "mfu_ratio")) is None else ratio,
    "cpu": _largest(cpu_ratio),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument("--once", action="store_true", help="print the table once and exit")
    options.add_options(parser, "--json", "--run NAMESPACE/", "--ranks")
    parser.add_argument("--sort", choices=tuple(SORTS), default="rank", help="order of the ranks (default: rank)")
    parser.add_argument("--rows", type=int, default=32, metavar="N", help="most ranks shown of a run (default: 32)")
    add_connection_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.rows < 1:
        raise CommandError(f"--rows {arguments.rows}: at least one, as in --rows 8")
    view = View(arguments.run, frozenset(options.selected_ranks(arguments)) or None, arguments.sort, arguments.rows)
    with connected(arguments) as (_, channel):
        return _show(channel, view, once=arguments.once, as_json=arguments.json)


def _show(channel: grpc.Channel, view: View, *, once: bool, as_json: bool) -> int:
    console = Terminal()
    if not once and not as_json and console.is_terminal:
        return _Live(channel, console, view).run()
    for jobs in _snapshots(channel, view.run, once=once):
        if once and view.run and not jobs:
            raise CommandError(f"{_nothing(view).plain}; `rankscope top --once` lists all runs", Exit.NOT_FOUND)
        if as_json:
            to_stdout(msgspec.json.encode(_answer(jobs, view)).decode())
        else:
            console.print(_screen(jobs, view, console.columns))
        if once:
            break
    return Exit.OK


# The server: what it knows of runs, now and after every change.


def _snapshots(channel: grpc.Channel, run: str, *, once: bool = False) -> Iterator[Jobs]:
    """A daemon without correlation knows ranks only."""
    try:
        stub = JobServiceStub(channel)
        if once:
            yield stub.ListJobs(pb.ListJobsRequest(run=run), timeout=CALL_SECONDS).jobs
        else:
            yield from (answer.jobs for answer in stub.WatchJobs(pb.WatchJobsRequest(run=run)))
        return
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
            raise
    while True:
        found = RankServiceStub(channel).ListRanks(ListRanksRequest(), timeout=CALL_SECONDS)
        yield _of_daemon([rank.latest for rank in found.ranks if is_wanted(rank.identity.job, run)])
        time.sleep(POLL_SECONDS)


def _of_daemon(windows: Sequence[RankWindow]) -> Jobs:
    by_job: defaultdict[str, list[RankWindow]] = defaultdict(list)
    for window in windows:
        by_job[window.identity.job].append(window)
    jobs = []
    for name, ranks in sorted(by_job.items()):
        verdict = pb.Verdict(kind=pb.VERDICT_KIND_INSUFFICIENT_DATA, severity=pb.SEVERITY_NONE, reason=ALONE)
        size = max(window.identity.world_size for window in ranks)
        job = pb.JobStatus(job=name, world_size=size, ranks_seen=len(ranks), verdict=verdict, ranks=ranks)
        steps = [window.step_seconds.p50 for window in ranks if window.HasField("step_seconds")]
        if steps:
            job.step_seconds = median(steps)
        jobs.append(job)
    return jobs


# The screen.


def _screen(jobs: Jobs, view: View, width: int | None) -> RenderableType:
    """Every run with its ranks."""
    parts: list[RenderableType] = [part for job in jobs for part in (*_run(job, view, width), Text())]
    return Group(*(parts or [_nothing(view)]))


def _live_screen(jobs: Jobs, view: View, width: int, height: int) -> RenderableType:
    """One line per run, and as many ranks of the selected run as fit."""
    if not jobs:
        return Group(_nothing(view), _keys(view))
    place = _place(jobs, view)
    above = itertools.takewhile(lambda part: isinstance(part, Text), _run(jobs[place], view, width))
    lines = sum(-(-max(1, cell_len(text.plain)) // max(1, width)) for text in above if isinstance(text, Text))
    room = max(1, height - OTHER_LINES - lines)
    # Runs above and below the chosen one, at most a third of the screen.
    most = max(1, room // 3)
    first = min(max(0, place - most // 2), max(0, len(jobs) - most))
    listed = jobs[first : first + most] if len(jobs) > 1 else ()
    rows = min(view.rows, max(1, room - len(listed)))
    marks = {jobs[place].job: ">"}
    parts = [
        Text(f"{marks.get(job.job, ' ')} {one_line(f'{job.job}  {_verdict_line(job)}', max(1, width - 2))}")
        for job in listed
    ]
    return Group(*parts, *_run(jobs[place], replace(view, rows=rows), width), _keys(view))


def _place(jobs: Jobs, view: View) -> int:
    return next((number for number, job in enumerate(jobs) if job.job == view.chosen), 0)


def _nothing(view: View) -> Text:
    what = f"no run {one_line(view.run, 200)}" if view.run else "no training rank"
    return Text(f"{what} is seen yet; `rankscope doctor` shows what can be seen", style="dim")


def _keys(view: View) -> Text:
    return Text(KEYS if view.shows_keys else f"sorted by {view.sort}; ? shows the keys", style="dim", no_wrap=True)


def _verdict_line(job: pb.JobStatus) -> str:
    verdict = verdict_of(job.verdict)
    lost = loss(verdict)
    return f"{MARKS[verdict.severity]} {headline(verdict)}{'; ' + lost if lost else ''}"


def _run(job: pb.JobStatus, view: View, width: int | None) -> Iterator[RenderableType]:
    verdict = verdict_of(job.verdict)
    facts = [f"{job.ranks_seen}/{count(job.world_size, 'rank')}"]
    if job.HasField("step_seconds"):
        facts.append(f"step {milliseconds(job.step_seconds)}")
    if job.HasField("mfu_ratio"):
        facts.append(f"MFU {job.mfu_ratio:.0%}")
    if job.HasField("exposed_communication_ratio"):
        facts.append(f"exposed communication {job.exposed_communication_ratio:.0%}")
    sources = sorted({window.wait_source for window in job.ranks} - {""})
    if sources:
        facts.append(f"wait by {', '.join(sources)}")
    style = {"alarm": "bold red", "warning": "yellow"}.get(verdict.severity.value, "green")
    yield Text(f"{one_line(job.job, NAME_CHARACTERS)}  {'  '.join(facts)}", style="bold")
    yield Text(_verdict_line(job), style=style)
    if verdict.asynchronous:
        yield Text(one_line(verdict.asynchronous, EVIDENCE_CHARACTERS))
    if silent := stale_nodes(job):
        others = f"; silent, too: {count(len(silent) - 1, 'more node')}" if len(silent) > 1 else ""
        yield Text(f"{silent[0]}{others}", style="yellow")
    if why := evidence(verdict):
        yield Text(one_line(why, EVIDENCE_CHARACTERS))
    breakdown = breakdown_of(job)
    if breakdown is not None and verdict.kind is not Kind.HANG:
        yield Text(one_line(_where_a_step_goes(breakdown, verdict), EVIDENCE_CHARACTERS))
    ranks = _ranks(job, view)
    if not ranks:
        return
    shown = _cut(ranks, verdict, view)
    yield rank_table(shown, verdict.culprits, stacks=True, nodes=True, columns=width, stale_seconds=job.stale_seconds)
    if len(ranks) > len(shown):
        yield Text(f"… and {count(len(ranks) - len(shown), 'more rank')} (--rows N shows more)", style="dim")


def _where_a_step_goes(breakdown: StepBreakdown, verdict: Verdict) -> str:
    """One line, as every line takes one from the ranks: the largest parts first."""
    largest = sorted(rows(breakdown, accused(verdict)), key=lambda row: -row.seconds)
    shown = [f"{row.name} {row.ratio:.0%}" for row in largest if row.ratio >= MIN_PART_RATIO]
    return f"a step goes to {', '.join(shown)}"


def _ranks(job: pb.JobStatus, view: View) -> list[RankWindow]:
    wanted = [window for window in job.ranks if view.ranks is None or window.identity.rank in view.ranks]
    return sorted(wanted, key=lambda window: (SORTS[view.sort](window), window.identity.rank))


def _cut(ranks: Sequence[RankWindow], verdict: Verdict, view: View) -> list[RankWindow]:
    """Culprits stay if a large run is cut."""
    culprits = frozenset(verdict.culprits)
    order = sorted(range(len(ranks)), key=lambda place: (ranks[place].identity.rank not in culprits, place))
    return [ranks[place] for place in sorted(order[: view.rows])]


class _Live:
    """The table on a terminal. One thread reads the server and one the keys; both report to `run`."""

    def __init__(self, channel: grpc.Channel, console: Terminal, view: View) -> None:
        self._channel = channel
        self._console = console
        self._view = view
        self._jobs: Jobs = ()
        self._events: queue.SimpleQueue[Jobs | str | grpc.RpcError] = queue.SimpleQueue()

    def run(self) -> int:
        # The terminal must get its modes back.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        threading.Thread(target=self._read_server, name="rankscope-top", daemon=True).start()
        with _keyboard(self._events.put), Live(console=self._console, screen=True, auto_refresh=False) as live:
            while True:
                size = self._console.size
                live.update(_live_screen(self._jobs, self._view, size.width, size.height), refresh=True)
                event = self._events.get()
                if isinstance(event, grpc.RpcError):
                    raise event
                if event in ("q", "\x03"):
                    return Exit.OK
                if isinstance(event, str):
                    self._view = _pressed(event, self._jobs, self._view)
                else:
                    self._jobs = event

    def _read_server(self) -> None:
        try:
            for jobs in _snapshots(self._channel, self._view.run):
                self._events.put(jobs)
        except grpc.RpcError as error:
            self._events.put(error)
        except ValueError:
            return  # the channel is closed: the user has left


def _pressed(key: str, jobs: Jobs, view: View) -> View:
    if key == "s":
        names = list(SORTS)
        return replace(view, sort=names[(names.index(view.sort) + 1) % len(names)])
    if key == "?":
        return replace(view, shows_keys=not view.shows_keys)
    move = {"j": 1, "\x1b[B": 1, "\x1bOB": 1, "k": -1, "\x1b[A": -1, "\x1bOA": -1}.get(key, 0)
    if not move or not jobs:
        return view
    return replace(view, chosen=jobs[min(max(_place(jobs, view) + move, 0), len(jobs) - 1)].job)


@contextmanager
def _keyboard(report: Callable[[str], None]) -> Iterator[None]:
    """Keys without Enter and without echo, while the table is there; nothing if stdin is not a terminal."""
    if not sys.stdin.isatty():
        yield
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def read() -> None:
        # An arrow comes as one piece of several bytes.
        while piece := os.read(descriptor, 16):
            text = piece.decode(errors="replace")
            for key in [text] if text.startswith("\x1b") else text:
                report(key)

    tty.setcbreak(descriptor)
    threading.Thread(target=read, name="rankscope-keys", daemon=True).start()
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


# For programs.


def _answer(jobs: Jobs, view: View) -> TopAnswer:
    return TopAnswer([_run_answer(job, state_of(job), view) for job in jobs])


def _run_answer(job: pb.JobStatus, state: JobState, view: View) -> TopRun:
    breakdown = breakdown_answer(state.breakdown, state.verdict)
    return TopRun(**run_fields(state), breakdown=breakdown, ranks=_rank_answers(job, view))


def _rank_answers(job: pb.JobStatus, view: View) -> list[TopRank]:
    return [top_rank(window, job.stale_seconds.get(window.identity.rank)) for window in _ranks(job, view)]
