"""What a capture leaves behind in a job that is bound by its host's launches, where every percent shows: step time in
long windows after captures against the window before them, beside jobs that go through the same without a capture.

    python3 -m benchmarks.gpu.aftermath [--cpu] [--out FOLDER] [--budget SECONDS] [--window SECONDS]

The host wanders by several per cent by itself, so four things tell it from what a capture did: windows of 12 s; jobs
with and without captures in turns; the fastest tenth of the steps, which a busy host hardly moves and an instrumented
launch does; and the CPU time a step takes."""

from __future__ import annotations

import argparse
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.capture_rows import AFTER_AT_MOST
from benchmarks.gpu.capturing import capture
from benchmarks.gpu.jobs import TrainingJob, training
from benchmarks.gpu.reporting import Report
from benchmarks.running import RunningDaemon, cpu_seconds, daemon

SETTLE_SECONDS = 5.0
CAPTURE_TAKES_SECONDS = 6.0  # a job without captures waits as long
CAPTURED_SECONDS = "0.3"
KINETO = {"KINETO_USE_DAEMON": "1"}
TEARDOWN = {"TEARDOWN_CUPTI": "1"}


@dataclass(frozen=True)
class Window:
    """Milliseconds of the steps in it, and what else went on."""

    name: str
    start_unix_seconds: float
    steps: int
    median: float
    fastest: float  # the tenth percentile
    mean: float
    cpu: float  # of the job, per step
    daemon_ratio: float | None  # of a core; None without a daemon
    stolen_ratio: float  # of all cores, by the hypervisor


@dataclass(frozen=True)
class Course:
    """One job: the first window is from before its first capture."""

    name: str
    windows: tuple[Window, ...]

    def ratios(self, figure: str) -> list[float]:
        before = getattr(self.windows[0], figure)
        return [getattr(window, figure) / before for window in self.windows[1:]]


@dataclass
class Bench:
    report: Report
    artifacts: Path
    cpu: bool
    window_seconds: float
    settle_seconds: float
    courses: list[Course]

    @property
    def seconds_each(self) -> float:
        """Of a capture and the window after it."""
        return CAPTURE_TAKES_SECONDS + self.settle_seconds + self.window_seconds + 1

    def window(self, name: str, job: TrainingJob, watching: RunningDaemon | None) -> Window:
        pid = job.processes[0].pid
        cpu, daemon_cpu, stolen, began = cpu_seconds(pid), _daemon_cpu(watching), stolen_seconds(), time.time()
        time.sleep(self.window_seconds)
        job.check()
        ended = time.time()
        used, stolen_now, daemon_now = cpu_seconds(pid) - cpu, stolen_seconds(), _daemon_cpu(watching)
        time.sleep(0.5)  # its record is written now and then
        millis = job.steps().between(began, ended)
        took = ended - began
        return Window(
            name=name,
            start_unix_seconds=began,
            steps=len(millis),
            median=float(np.median(millis)),
            fastest=float(np.quantile(millis, 0.1)),
            mean=float(millis.mean()),
            cpu=used / len(millis) * 1e3,
            daemon_ratio=None if daemon_cpu is None or daemon_now is None else (daemon_now - daemon_cpu) / took,
            stolen_ratio=(stolen_now[0] - stolen[0]) / max(1e-9, stolen_now[1] - stolen[1]),
        )

    def tell(self, course: Course) -> None:
        self.courses.append(course)
        self.report.raw.setdefault("courses", []).append(asdict(course))
        first = course.windows[0]
        self.report.add(
            f"{course.name}: step before",
            f"{first.median:.3f} ms, fastest tenth {first.fastest:.3f}, CPU {first.cpu:.3f} ms a step"
            f"{_background(first)}",
        )
        for window in course.windows[1:]:
            self.report.add(
                f"{course.name}, {window.name}: after ÷ before",
                f"{window.median / first.median:.3f} (fastest tenth {window.fastest / first.fastest:.3f}, mean "
                f"{window.mean / first.mean:.3f}, CPU a step {window.cpu / first.cpu:.3f}){_background(window)}",
            )


def step_record(job: TrainingJob) -> dict[str, Any]:
    """All of its steps, as one long line: a number to a line would be most of the file."""
    steps = job.steps()
    micros = " ".join(str(round(one * 1e3)) for one in steps.millis)
    return {"first_step_unix_seconds": float(steps.device_end[0]), "step_microseconds": micros}


def run_job(
    bench: Bench,
    watching: RunningDaemon,
    name: str,
    environment: dict[str, str],
    captures: int,
    flags: Sequence[str] | None,
    stop_daemon: bool = False,
) -> None:
    """`flags` of the captures; None for a job that only lives through the same schedule."""
    shape, backend = ("cpu-small", "gloo") if bench.cpu else ("small", "nccl")
    with training(shape, backend, 1, KINETO | environment, cpu=bench.cpu) as job:
        job_name = job.name(watching)
        time.sleep(bench.settle_seconds)
        windows = [bench.window("before", job, watching)]

        def captured() -> str:
            if flags is None:
                time.sleep(CAPTURE_TAKES_SECONDS if bench.settle_seconds >= SETTLE_SECONDS else bench.settle_seconds)
                return "nothing done"
            output = bench.artifacts / f"{len(list(bench.artifacts.iterdir())):02d}"
            one = capture(watching, job, job_name, ("--seconds", CAPTURED_SECONDS, *flags), output)
            kept: dict[str, Any] = {"job": name, "status": one.status, "kernels": one.kernels}
            kept |= {"asked_unix_seconds": one.asked_unix_seconds, "answered_unix_seconds": one.answered_unix_seconds}
            bench.report.raw.setdefault("captures", []).append(kept)
            if not one.delivered:
                bench.report.add(f"{name}, capture", f"not delivered: {one.why_not}", "every rank delivers", False)
            return f"{one.answered_unix_seconds - one.asked_unix_seconds:.1f} s"

        for number in range(1, captures + 1):
            text = captured()
            time.sleep(bench.settle_seconds)
            windows.append(bench.window(f"capture {number} ({text})" if flags is not None else text, job, watching))
        bench.tell(Course(name, tuple(windows)))
        if stop_daemon and bench.report.seconds_left > bench.seconds_each:
            text = captured()
            watching.process.terminate()
            watching.process.wait(20)
            time.sleep(bench.settle_seconds)
            alone = bench.window(f"capture {captures + 1} ({text}), then no daemon", job, None)
            bench.tell(Course(f"{name}, daemon stopped", (windows[0], alone)))
        bench.report.raw.setdefault("steps", {})[name] = step_record(job)


def summary(bench: Bench) -> None:
    """Captured against not captured, each by its own window before."""
    groups = {
        label: [one for one in bench.courses if one.name.startswith(prefix) and "stopped" not in one.name]
        for label, prefix in (("captured", "captured"), ("control", "not captured"))
    }
    for figure, text in (("median", "step"), ("fastest", "fastest tenth of the steps"), ("cpu", "CPU time a step")):
        found = {
            label: [one for course in courses for one in course.ratios(figure)] for label, courses in groups.items()
        }
        if not all(found.values()):
            bench.report.add(f"all windows, {text}", "not both kinds of job were seen", "both", False)
            continue
        both = {label: geometric_mean(ratios) for label, ratios in found.items()}
        ratio = both["captured"] / both["control"]
        judged = figure != "cpu"
        bench.report.add(
            f"TEARDOWN_CUPTI=1, {text}, after ÷ before: captured ÷ not captured",
            f"{ratio:.3f}: captured {both['captured']:.3f} ({_range(found['captured'])}), "
            f"not captured {both['control']:.3f} ({_range(found['control'])})",
            f"≤ {AFTER_AT_MOST}" if judged else "",
            ratio <= AFTER_AT_MOST if judged else None,
        )
        bench.report.raw.setdefault("summary", {})[figure] = {**found, "captured_to_control": ratio}


def geometric_mean(ratios: Sequence[float]) -> float:
    return float(statistics.geometric_mean(ratios))


def stolen_seconds() -> tuple[float, float]:
    """Time the hypervisor gave to others and all time, of all cores, in ticks."""
    fields = [float(one) for one in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return (fields[7] if len(fields) > 7 else 0.0), sum(fields[:8])


def _daemon_cpu(watching: RunningDaemon | None) -> float | None:
    return None if watching is None else cpu_seconds(watching.process.pid)


def _background(window: Window) -> str:
    own = "no daemon" if window.daemon_ratio is None else f"daemon {window.daemon_ratio:.1%} of a core"
    return f"; {own}, {window.stolen_ratio:.1%} stolen, {window.steps} steps"


def _range(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.3f} – {max(ratios):.3f}, {len(ratios)} windows"


def measure(bench: Bench) -> None:
    each = bench.seconds_each
    start = each + 2  # a job's own start, and its window before
    with daemon() as watching:
        run = partial(run_job, bench, watching)
        # In the order of what may be missing last; the daemon is stopped in the end.
        parts = (
            ("captured 1", partial(run, "captured 1", TEARDOWN, 2, ()), start + 2 * each),
            ("not captured 1", partial(run, "not captured 1", TEARDOWN, 2, None), start + 2 * each),
            ("not captured 2", partial(run, "not captured 2", TEARDOWN, 2, None), start + 2 * each),
            ("captured 2", partial(run, "captured 2", TEARDOWN, 2, (), stop_daemon=True), start + 2 * each),
        )
        without = (
            "without TEARDOWN_CUPTI",
            partial(run, "without TEARDOWN_CUPTI", {}, 1, ("--allow-slowdown",)),
            start + each,
        )
        for name, function, seconds in (*parts[:2], *(() if bench.cpu else (without,)), *parts[2:]):
            bench.report.part(name, function, seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="a tiny model on the CPU: to try the script itself")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--budget", type=float, default=375.0, help="seconds; parts that would not fit are left out")
    parser.add_argument("--window", type=float, default=12.0, help="seconds of each window")
    asked = parser.parse_args()
    title = "What a capture leaves behind" + (" (dry run without a GPU)" if asked.cpu else "")
    report = Report(title, asked.out, "aftermath", asked.budget, judged=not asked.cpu)
    artifacts = Path(tempfile.mkdtemp(prefix="rankscope-artifacts-"))
    bench = Bench(report, artifacts, asked.cpu, asked.window, SETTLE_SECONDS, [])
    if asked.cpu:
        bench = replace(bench, window_seconds=min(asked.window, 2.0), settle_seconds=1.0)
    # Ended by `timeout`: what there is by then is told, and nothing is left running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        report.part("all of it", lambda: measure(bench))
    finally:
        summary(bench)
        shutil.rmtree(artifacts, ignore_errors=True)
        missed = report.finish()
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
