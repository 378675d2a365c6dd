"""`make test`: every suite, and a table at the end. A suite that fails keeps no other from running.

Suites that mostly wait run beside suites that compute; training jobs, which are judged by their timing, run alone. The
output of a suite is printed when it ends, so that suites that run together do not mix."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from tools.awake_cores import awake_cores

ROOT = Path(__file__).resolve().parent.parent
PROGRESS_SECONDS = 30.0


@dataclass(frozen=True)
class Step:
    """A suite, or something that suites need."""

    name: str
    command: tuple[str, ...]
    is_pytest: bool = False


def suite(name: str, *options: str) -> Step:
    return Step(name, (sys.executable, "-m", "pytest", "-q", "--durations=5", *options), is_pytest=True)


Lane = Sequence[Step]
# Built once, six minutes; a second lane that needs it waits for the first.
API_SERVER = Step("API server (set-up)", ("tools/setup_kube.sh",))
SLURM = Step("Slurm (set-up)", ("tools/setup_slurm.sh",))
PPROF = Step("pprof (set-up)", ("tools/setup_pprof.sh",))
CHROMIUM = Step("Chromium (set-up)", ("tools/setup_chromium.sh",))
CONSOLE = Step("packages of the console (set-up)", ("tools/setup_console.sh",))
HELM = Step("helm (set-up)", ("tools/setup_helm.sh",))
LINT = Step("lint", ("make", "--no-print-directory", "lint"))
# Scrapes a whole cluster with a job in it.
ONE_NAME = "tests/kube/test_one_name.py"
# A real job and four daemons beside it, which mostly wait.
PRIVILEGES = "tests/ship/test_daemon_privileges.py"
JOBLESS_ALERTS = (
    "tests/alerts/test_prometheus_stack.py",
    "tests/alerts/test_dashboards_of_many_ranks.py",
    "tests/alerts/test_console.py",
)
CONSOLE_OF_DEMO = "tests/console/test_demo.py"
# Rows run one after the other, the lanes of a row together, the steps of a lane one after the other. `-n`: processes
# that share the tests of a suite. Those of the operator mostly wait, each process with an API server of its own; a file
# stays with one process, because its fixtures create namespaces with fixed names.
ROWS: Sequence[Sequence[Lane]] = (
    (
        (LINT, suite("unit", "tests/unit", "-n", "2", "--dist", "worksteal")),
        (
            API_SERVER,
            suite(
                "operator on an API server",
                *("tests/kube", f"--ignore={ONE_NAME}", "-n", "3", "--dist", "loadfile", "--no-loadscope-reorder"),
            ),
        ),
        (HELM, API_SERVER, suite("chart", "tests/ship", f"--ignore={PRIVILEGES}"), suite("images", "tests/images")),
        (
            suite("fuzz targets", "tests/fuzz"),
            suite("Prometheus, without jobs", *JOBLESS_ALERTS),
            CHROMIUM,
            CONSOLE,
            suite("console (pages)", "tests/console", f"--ignore={CONSOLE_OF_DEMO}"),
            HELM,
            suite("privileges of the chart's daemon", PRIVILEGES),
        ),
    ),
    ((suite("security", "tests/security", "-m", "not beside_a_job"),),),
    ((suite("security (beside training jobs)", "tests/security", "-m", "beside_a_job"),),),
    (
        (
            CHROMIUM,
            PPROF,
            suite("integration (processes)", "tests/integration", "-n", "2", "--dist", "loadfile"),
        ),
    ),
    ((suite("end-to-end (training jobs)", "tests/e2e", CONSOLE_OF_DEMO),),),
    ((SLURM, suite("Slurm (training jobs)", "tests/slurm")),),
    ((suite("frameworks (training jobs)", "tests/frameworks", "-m", "representative"),),),
    (
        (
            suite(
                "alerts and dashboards (training jobs)",
                "tests/alerts",
                ONE_NAME,
                *(f"--ignore={path}" for path in JOBLESS_ALERTS),
            ),
        ),
    ),
)


@dataclass(frozen=True)
class Result:
    name: str
    tests: str
    is_failed: bool
    seconds: float


class Run:
    def __init__(self, folder: Path) -> None:
        self.results: list[Result] = []
        self._folder = folder
        self._running: dict[int, tuple[str, float]] = {}  # by lane: name and begin
        self._lock = threading.Lock()

    def run_row(self, lanes: Sequence[Lane]) -> None:
        with ThreadPoolExecutor(len(lanes)) as pool:
            left = {pool.submit(self._run_lane, lane) for lane in lanes}
            while left:
                done, left = wait(left, timeout=PROGRESS_SECONDS)
                self._print_progress()
                for lane in done:
                    lane.result()

    def _run_lane(self, lane: Lane) -> None:
        for step in lane:
            self._run(step)

    def _run(self, step: Step) -> None:
        report = self._folder / f"{step.name}.xml"
        options = (f"--junitxml={report}",) if step.is_pytest else ()
        began = time.monotonic()
        with self._lock:
            self._running[threading.get_ident()] = step.name, began
            print(f"==> {step.name}", flush=True)
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
            command = [*step.command, *options]
            status = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT).returncode
            output.seek(0)
            with self._lock:
                del self._running[threading.get_ident()]
                tests = counts_of(report) if step.is_pytest else ""
                self.results.append(Result(step.name, tests, status != 0, time.monotonic() - began))
                print(f"==> {step.name}: output\n{output.read().rstrip()}", flush=True)

    def _print_progress(self) -> None:
        with self._lock:
            running = [f"{name}: {time.monotonic() - began:.0f} s" for name, began in self._running.values()]
            if running:
                print(f"    {', '.join(running)}", flush=True)


def counts_of(report: Path) -> str:
    """As in `120 passed, 1 failed`; empty where pytest did not get as far as the end of its report."""
    try:
        found = ElementTree.parse(report).getroot().find("testsuite")
    except (FileNotFoundError, ElementTree.ParseError):
        return ""
    assert found is not None
    total, failures, errors, skipped = (int(found.get(key, "0")) for key in ("tests", "failures", "errors", "skipped"))
    counts = {"passed": total - failures - errors - skipped, "failed": failures + errors, "skipped": skipped}
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


def print_table(results: Sequence[Result]) -> None:
    print(f"\n{'suite':<38} {'tests':<32} {'outcome':<7} {'time':>6}")
    for result in results:
        minutes, seconds = divmod(int(result.seconds), 60)
        outcome = "FAILED" if result.is_failed else "passed"
        print(f"{result.name:<38} {result.tests:<32} {outcome:<7} {minutes:3}:{seconds:02}")


def main() -> int:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rankscope-tests-") as folder, awake_cores():
        run = Run(Path(folder))
        for lanes in ROWS:
            run.run_row(lanes)
    failed = [result.name for result in run.results if result.is_failed]
    everything = Result("all", "", bool(failed), time.monotonic() - began)
    print_table([*run.results, everything])
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
