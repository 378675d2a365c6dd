"""What being watched costs a job on a GPU: the probe, and a daemon with everything on, against nothing, in turns.

    python3 -m benchmarks.gpu.overhead [--frameworks ddp,small,tp2-pp2] [--pairs 80] [--block-seconds 0.35] [--cpu]

Blocks of one job are compared (`alternation.py`): without the probe while the daemon and its children are stopped by a
signal, and with the probe while they run. Steps are timed by the job itself, by CUDA events. Jobs wander by 3 % from
one stretch of time to the next, however long it is: blocks are short and many, and the ratio is the median over pairs
of neighbours. See README.md beside this for what has to be on PYTHONPATH."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.gpu.foreign import SCRIPT, SCRIPT_ENVIRONMENT, script_arguments, unpacked
from benchmarks.gpu.foreign_cells import LAYOUTS, Layout
from benchmarks.gpu.lab import LabJob, await_start, lab_job, multi_process_service, probe_folder
from benchmarks.gpu.reporting import Report
from benchmarks.running import BenchmarkError, RunningDaemon, child_pids, daemon
from benchmarks.statistics import median_of_ratios, paired_ratio
from tools.jobs.alternation import MIN_BLOCK_STEPS, is_on

WARM_UP_SECONDS = 8.0
# The first part of a block, in which the daemon catches up and queues from before it are worked off.
DROPPED_RATIO = 0.3
RATIO_AT_MOST = 1.01
POLL_SECONDS = 0.005
LONG_STEP_SECONDS = 0.6
LAYOUTS_BY_NAME = {layout.name: layout for layout in LAYOUTS}


class DaemonSwitch:
    """Stops and continues the daemon with all its children."""

    def __init__(self, watching: RunningDaemon) -> None:
        self._pid = watching.process.pid

    def set(self, is_running: bool) -> None:
        number = signal.SIGCONT if is_running else signal.SIGSTOP
        for pid in _family(self._pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _family(pid: int) -> Iterator[int]:
    """The parent first, so that it starts no other child meanwhile."""
    yield pid
    with contextlib.suppress(OSError):
        for child in child_pids(pid):
            yield from _family(child)


def block_medians(
    millis: Sequence[np.ndarray], plan: dict[str, int], average: str = "median"
) -> tuple[list[float], list[float]]:
    """On and off, in pairs: the typical step of each block, as the middle rank saw it. Line 0 of a record is step 2."""
    made: dict[bool, list[float]] = {True: [], False: []}
    length = plan["steps_per_block"]
    for block in range(plan["blocks"]):
        # The border after step s is where the next block begins, so step s + 1 is its first.
        start = plan["first_step"] + block * length - 1
        kept = slice(start + round(DROPPED_RATIO * length), start + length)
        values = [float(getattr(np, average)(one[kept])) for one in millis]
        made[is_on(block)].append(float(np.median(values)))
    return made[True], made[False]


def measure(report: Report, asked: argparse.Namespace, probe: Path, environment: dict[str, str], name: str) -> None:
    """`name`: a framework of framework_job.py, or a layout of foreign.py."""
    with contextlib.ExitStack() as stack:
        if name in LAYOUTS_BY_NAME:
            job = stack.enter_context(_foreign_job(asked, probe, environment, LAYOUTS_BY_NAME[name]))
        else:
            job = stack.enter_context(_framework_job(asked, probe, environment, name))
        watching = stack.enter_context(daemon(command="up"))
        await_start([job], asked.cpu)
        plan = _follow(job, DaemonSwitch(watching), _limit(asked, name), keeps_stopped=asked.of == "probe")
        if plan is None:
            raise BenchmarkError(f"the job announced no blocks: {job.log_tail(0)}")
        millis = [steps.millis for steps in map(job.steps, range(len(job.processes)))]
        said = next((line for line in job.log(0).splitlines() if line.startswith("switched")), "")
    print(f"  {name}: {plan}; {said}", flush=True)
    part = "" if asked.of == "both" else f", the {asked.of} alone"
    for average in ("median", "mean"):
        on, off = block_medians(millis, plan, average)
        is_target = average == "median"
        ratio = median_of_ratios(on, off) if is_target else paired_ratio(on, off, average=np.mean)
        report.add(
            f"{name}{part}, {average} step ({float(np.median(off)):.2f} ms without), {len(on)} pairs",
            f"{ratio.ratio:.4f} × ({ratio.low:.4f} – {ratio.high:.4f})",
            f"≤ {RATIO_AT_MOST:g} ×" if is_target else "",
            ratio.ratio <= RATIO_AT_MOST if is_target else None,
        )
        report.raw[f"{name} {average}"] = {"on_milliseconds": on, "off_milliseconds": off, "plan": plan}
    shortest = min(map(len, millis))
    by_step = np.median([one[:shortest] for one in millis], axis=0)
    report.raw[f"{name} steps"] = [round(float(value), 3) for value in by_step]


def _limit(asked: argparse.Namespace, name: str) -> float:
    """Seconds from the first step on, however slow the steps are."""
    pairs, seconds = asked.pairs, asked.block_seconds
    if name in LAYOUTS_BY_NAME:
        pairs, seconds = asked.layout_pairs, max(seconds, MIN_BLOCK_STEPS * LONG_STEP_SECONDS / 2)
    return float(asked.warm_up + 4 * pairs * seconds + 60)


def _framework_job(
    asked: argparse.Namespace, probe: Path, environment: dict[str, str], name: str
) -> contextlib.AbstractContextManager[LabJob]:
    words = ["--framework", name, "--pairs", asked.pairs, "--block-seconds", asked.block_seconds]
    words += ["--start-after", asked.warm_up, "--seconds", _limit(asked, name), "--width", asked.width]
    words += ["--keep-probe"] if asked.of == "daemon" else []
    return lab_job(
        "framework_job.py",
        [str(word) for word in words],
        cpu=asked.cpu,
        ranks=asked.ranks,
        environment=environment,
        probe=probe,
        label=name,
    )


@contextlib.contextmanager
def _foreign_job(
    asked: argparse.Namespace, probe: Path, environment: dict[str, str], layout: Layout
) -> Iterator[LabJob]:
    """A trainer that is not ours. Its steps are long, and so are its blocks, of eight steps each."""
    with tempfile.TemporaryDirectory(prefix="rankscope-foreign-") as scratch:
        folder = Path(scratch)
        source = unpacked(asked.source, folder, asked.cpu)
        words = ["--pairs", asked.layout_pairs, "--block-seconds", asked.block_seconds]
        words += ["--after", asked.warm_up, "--seconds", _limit(asked, layout.name)]
        words += ["--keep-probe"] if asked.of == "daemon" else []
        arguments = [*script_arguments(layout, source, folder, asked.cpu), *map(str, words)]
        packages = os.pathsep.join(filter(None, (str(source.modules), os.environ.get("JOB_PYTHONPATH"))))
        with mock.patch.dict(os.environ, {"JOB_PYTHONPATH": packages}):
            job = lab_job(
                str(SCRIPT),
                arguments,
                cpu=asked.cpu,
                ranks=layout.ranks,
                environment=environment | SCRIPT_ENVIRONMENT,
                probe=probe,
                label=layout.name,
            )
            with job as running:
                yield running


def _follow(job: LabJob, switch: DaemonSwitch, limit: float, keeps_stopped: bool) -> dict[str, Any] | None:
    """Switch the daemon at the borders of blocks, as rank 0's device passes them, and return the plan of the blocks."""
    give_up_at = time.monotonic() + limit + 30
    plan, block = None, -1
    try:
        while job.running:
            job.check(may_end=True)
            if time.monotonic() > give_up_at:
                raise BenchmarkError(f"the job did not end in time: {job.log_tail(0)}")
            plan = plan or job.fact("plan.json")
            if plan is not None:
                passed = (job.device_progress(0) - 1 - plan["first_step"]) // plan["steps_per_block"]
                if passed != block and 0 <= passed < plan["blocks"]:
                    block = passed
                    switch.set(is_on(block) and not keeps_stopped)
            time.sleep(POLL_SECONDS)
        return plan
    finally:
        switch.set(True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frameworks", default="fsdp2,ddp")
    parser.add_argument("--of", choices=("both", "probe", "daemon"), default="both", help="what is switched on and off")
    parser.add_argument("--pairs", type=int, default=80)
    parser.add_argument("--layout-pairs", type=int, default=30, help="the same for layouts of foreign trainers")
    parser.add_argument("--source", type=Path, default=Path("gpu-foreign"), help="as of foreign.py")
    parser.add_argument("--block-seconds", type=float, default=0.35)
    parser.add_argument(
        "--warm-up",
        type=float,
        default=WARM_UP_SECONDS,
        help="seconds before the first block; after 448 steps, the job has measured what NCCL's times cost it",
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--width", type=int, help="of the model (default: 512, 64 with --cpu)")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds; what would not fit is left out")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--cpu", action="store_true", help="small models over gloo: to try the script itself")
    asked = parser.parse_args()
    asked.width = asked.width or (64 if asked.cpu else 512)
    title = "Overhead" + (" (dry run without a GPU: only shows that the script works)" if asked.cpu else "")
    report = Report(title, asked.out, "overhead", asked.budget, judged=not asked.cpu)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    probe = Path(tempfile.mkdtemp(prefix="rankscope-probe-"))
    try:
        with contextlib.ExitStack() as stack:
            environment = {} if asked.cpu else stack.enter_context(multi_process_service())
            probe_folder(probe)
            for name in asked.frameworks.split(","):
                seconds = (_limit(asked, name) - asked.warm_up - 60) / 2 + asked.warm_up + 32
                report.part(name, partial(measure, report, asked, probe, environment, name), seconds)
    finally:
        shutil.rmtree(probe, ignore_errors=True)
        missed = report.finish()
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
