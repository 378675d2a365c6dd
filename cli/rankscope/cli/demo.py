"""`rankscope demo`: a real training job, a real fault, and Rankscope's verdict. The daemon gets no hints."""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import tempfile
import time
from contextlib import ExitStack
from types import FrameType

from rich.text import Text

from rankscope.cli.demo_job.faults import NONE, FaultError, parse_fault
from rankscope.cli.demo_job.launcher import DemoJob, DemoJobError
from rankscope.cli.demo_report import Outcome, Watch, print_summary, print_verdict, to_json
from rankscope.cli.messages import Exit, log_to_stderr, refuse, to_stderr, to_stdout
from rankscope.cli.options import add_options
from rankscope.cli.standalone import ConsoleListen, Standalone, private_config
from rankscope.cli.terminal import Terminal
from rankscope.daemon.server.sockets import ListenError

FAULT_SECONDS = 30.0
# Stacks alone need two intervals of samples that agree.
FAULT_SECONDS_WITHOUT_PROBE = 60.0
HEALTHY_SECONDS = 30.0
START_TIMEOUT_SECONDS = 180.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Starts a real PyTorch job over gloo on this machine, lets it train, switches a fault on, and shows\n"
        "how long Rankscope takes to name it. Needs no GPU, no cluster and no Prometheus.\n\n"
        "faults:\n"
        "  none                               the healthy twin: nothing may be raised\n"
        "  slow-rank[:rank=R,delay=MS]        one rank sleeps in a function of its forward pass\n"
        "  slow-input[:rank=R]                one rank's dataset is slow\n"
        "  slow-network                       the all-reduce is slow for everybody\n"
        "  stage-imbalance                    a pipeline of 2 stages with one heavy stage\n"
        "  hang[:rank=R]                      one rank never enters the collective\n"
        "  starved[:rank=R]                   one rank is confined to a fraction of a core"
    )
    parser.epilog = "Exits with 0 if the verdict is right, 1 if not. Example: rankscope demo --fault slow-input:rank=1"
    parser.add_argument("--world-size", type=int, default=4, metavar="N", help="ranks of the job (default: 4)")
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="SECONDS",
        help="watch so long after the fault began (default: until it is found)",
    )
    parser.add_argument("--fault", default="slow-rank", metavar="FAULT", help="see above (default: slow-rank)")
    add_options(parser, "--json")
    parser.add_argument("--no-probe", action="store_true", help="level 0: stacks and process counters only")


def run(arguments: argparse.Namespace) -> int:
    try:
        fault = parse_fault(arguments.fault).for_ranks(arguments.world_size)
        if arguments.seconds is not None and not 1 <= arguments.seconds <= 86400:
            raise FaultError(f"--seconds {arguments.seconds:g}: take 1 to 86400")
    except FaultError as error:
        return refuse(str(error))
    if importlib.util.find_spec("torch") is None:  # the ranks need it, in processes of their own
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    log_to_stderr("error")
    signal.signal(signal.SIGTERM, _interrupt)
    console = Terminal(stderr=arguments.json)
    job = DemoJob(arguments.world_size, fault, probe=not arguments.no_probe)
    try:
        outcome = _play(job, arguments.seconds, console)
    except (DemoJobError, ListenError) as error:
        for line in f"error: {error}".splitlines():
            to_stderr(line)
        return Exit.FAILED
    if arguments.json:
        to_stdout(json.dumps(to_json(outcome)))
    else:
        print_summary(console, outcome)
    return Exit.OK if outcome.is_right else Exit.FAILED


def _play(job: DemoJob, seconds: float | None, console: Terminal) -> Outcome:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rankscope-demo-"))
        config = private_config(folder)
        ranks = f": {job.ranks} ranks of PyTorch over gloo, fault: {job.fault.spec}"
        console.print(Text.assemble(("rankscope demo", "bold"), ranks))
        # The demo draws and launches in the same process; the budget covers only the daemon's thread.
        standalone = stack.enter_context(Standalone(config, own_cpu_seconds=time.thread_time, console=ConsoleListen()))
        console.print(f"· console: {standalone.console_url}")
        status = stack.enter_context(console.status("starting the ranks (importing torch takes a while) …"))
        watch = Watch(standalone.correlator, job, lambda line: status.update(line))
        stack.callback(job.stop)
        job.start()
        job.wait_until_training(START_TIMEOUT_SECONDS)
        console.print("· training; watching it healthy first")
        watch.until_settled()
        if job.fault.kind == NONE:
            watch.for_seconds(seconds or HEALTHY_SECONDS)
            return watch.outcome()
        watch.start_fault()
        console.print(Text.assemble("· fault ", (job.fault.spec, "bold"), " begins now; the daemon is not told"))
        patience = FAULT_SECONDS if job.probe else FAULT_SECONDS_WITHOUT_PROBE
        if watch.until_alarm(seconds or patience):
            status.stop()
            print_verdict(console, watch.outcome())
            status.start()
            watch.until_cause_settles(seconds)
        return watch.outcome()


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
