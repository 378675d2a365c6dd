"""`make test` and `make acceptance`: suites, each in a sandbox of its own, and a table at the end.

A suite that fails keeps no other from running. The output of a suite is printed when it ends, so that suites that run
together do not mix. After all others, tests that failed run once more, alone: one that passes then is listed, and does
not fail the run."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from tools import acceptance_results, sandbox
from tools.acceptance_results import Measurement, SuiteResults
from tools.awake_cores import awake_cores

ROOT = Path(__file__).resolve().parent.parent
PROGRESS_SECONDS = 30.0
OUTPUT_BYTES = 1 << 18  # read for progress; letters come first
REPORTS = ROOT / ".test-reports"  # of pytest, for each suite
# More failures than this have one cause, such as a server that did not start, and share processes again.
FEW_FAILED = 10
# Programs that tests start: seen before a run, they are somebody else's or left over.
LOOKED_FOR = ("rankscope", "torchrun", "prometheus", "alertmanager", "apiserver", "etcd", "chrom", "slurm", "pytest")


@dataclass(frozen=True)
class Suite:
    """Tests that share a process, or a few; or another command, where `command` is given."""

    name: str
    options: tuple[str, ...] = ()  # of pytest
    needs: tuple[str, ...] = ()  # tools/setup_NAME.sh, each of which does nothing the next time
    command: tuple[str, ...] = ()


Lane = Sequence[Suite]
# Rows run one after the other, the lanes of a row together, the suites of a lane one after the other. What shares a row
# mostly waits, and each suite is in a sandbox of its own. `-n`: processes that share the tests of a suite. Each
# process of the operator's suite has an API server of its own; a file stays with one process, because its fixtures
# create namespaces with fixed names.
IN_TEST = ("-m", "not acceptance")
IN_ACCEPTANCE = ("-m", "acceptance or measured")
BY_FILE = ("--dist", "loadfile", "--no-loadscope-reorder")
IN_BROWSER = ("chromium", "console")
SET_UPS = ("kube", "helm", "chromium", "console", "pprof", "images", "zig")
TEST_ROWS: Sequence[Sequence[Lane]] = (
    (
        (
            Suite("lint", command=("make", "--no-print-directory", "lint")),
            Suite("unit", ("tests/unit", "-n", "2", "--dist", "worksteal")),
        ),
        (
            # Built or fetched once: six minutes on a new machine.
            *(Suite(f"set-up of {name}", command=(f"tools/setup_{name}.sh",)) for name in SET_UPS),
            Suite("security", ("tests/security",)),
            Suite("prometheus", ("tests/alerts",)),
        ),
    ),
    (
        (
            Suite("operator", ("tests/kube", "-n", "3", *BY_FILE), ("kube",)),
            Suite("jobs", ("tests/e2e", "tests/frameworks", "tests/captures")),
        ),
        (
            Suite("chart", ("tests/ship",), ("helm", "kube", "zig")),
            Suite("images", ("tests/images",), ("images",)),
            Suite("console", ("tests/console",), IN_BROWSER),
        ),
        (
            Suite("fuzz", ("tests/fuzz",)),
            Suite("integration", ("tests/integration", "-n", "2", *BY_FILE), ("chromium", "pprof")),
        ),
    ),
)
# One at a time: these are judged by how well and how fast, and each takes what the machine has.
ACCEPTANCE: Lane = (
    Suite("demo", ("tests/e2e", "tests/console/test_demo.py"), IN_BROWSER),
    Suite("endings", ("tests/endings",)),
    Suite("frameworks", ("tests/frameworks",), ("frameworks",)),
    Suite("bystander", ("tests/security",)),
    Suite("captures", ("tests/captures",)),
    Suite("noise", ("tests/noise",)),
    Suite("hangs", ("tests/hangs", "tests/integration/test_hangs.py")),
    Suite("slurm", ("tests/slurm",), ("slurm",)),
    Suite("alerts", ("tests/alerts",)),
    Suite("fleet", ("tests/fleet",)),
    Suite("operator", ("tests/kube",), ("kube",)),
    Suite("integration", ("tests/integration", "--ignore=tests/integration/test_hangs.py"), ("hta", "old_protobuf")),
    Suite("images", ("tests/images",), ("images",)),
    Suite("parsers", ("tests/unit", "tests/fuzz")),
    Suite("soak", ("tests/soak",)),
)


@dataclass(frozen=True)
class Result:
    suite: Suite
    is_failed: bool
    seconds: float
    counts: dict[str, int] = field(default_factory=dict)
    measured: tuple[Measurement, ...] = ()
    failed: frozenset[str] = frozenset()  # tests; empty where pytest did not get as far


class Run:
    def __init__(self, folder: Path, options: Sequence[str]) -> None:
        self.results: dict[str, Result] = {}
        self.run_again: dict[str, bool] = {}  # by test, or suite that did not start: whether it passed then
        self._folder = folder
        self._options = options
        self._running: dict[int, tuple[str, float, int]] = {}  # by thread: name, begin, descriptor of its output
        self._lock = threading.Lock()

    def run_row(self, lanes: Sequence[Lane]) -> None:
        with ThreadPoolExecutor(len(lanes)) as pool:
            left = {pool.submit(self._run_lane, lane) for lane in lanes}
            while left:
                done, left = wait(left, timeout=PROGRESS_SECONDS)
                self._print_progress()
                for lane in done:
                    lane.result()

    def run_failed_again(self) -> None:
        failed = [result for result in self.results.values() if result.is_failed and not result.suite.command]
        for first in failed:
            again = self._run(first.suite, "--last-failed", *(("-n", "0") if len(first.failed) <= FEW_FAILED else ()))
            for name in first.failed or {first.suite.name}:
                self.run_again[name] = not again.is_failed or (bool(again.failed) and name not in again.failed)
            counts = {**first.counts, "failed": again.counts.get("failed", 0)}
            counts["passed"] = first.counts.get("passed", 0) + again.counts.get("passed", 0)
            seconds = first.seconds + again.seconds
            self.results[first.suite.name] = Result(
                first.suite, again.is_failed, seconds, counts, first.measured, again.failed
            )

    def _run_lane(self, lane: Lane) -> None:
        for suite in lane:
            self.results[suite.name] = self._run(suite)

    def _run(self, suite: Suite, *more: str) -> Result:
        report, cache = self._folder / f"{suite.name}{'-again' * bool(more)}.xml", self._folder / f"{suite.name}.cache"
        began = time.monotonic()
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
            with self._lock:
                self._running[threading.get_ident()] = suite.name, began, output.fileno()
                print(f"==> {suite.name}", flush=True)
            needs = ([f"tools/setup_{name}.sh"] for name in suite.needs)
            is_set_up = all(self._call(command, output.fileno()) == 0 for command in needs)
            if suite.command:
                status = self._call(suite.command, output.fileno())
            elif is_set_up:
                options = ("-q", "--durations=5", f"--junitxml={report}", "-o", f"cache_dir={cache}")
                command = [sys.executable, "-m", "pytest", *options, *suite.options, *self._options, *more]
                status = sandbox.run(command, output=output.fileno())
            else:
                status = 1
            output.seek(0)
            with self._lock:
                del self._running[threading.get_ident()]
                print(f"==> {suite.name}: output\n{output.read().rstrip()}", flush=True)
        seconds = time.monotonic() - began
        return Result(suite, status != 0, seconds, counts_of(report), measured_in(report), failed_of(cache))

    def _call(self, command: Sequence[str], output: int) -> int:
        return subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT).returncode

    def _print_progress(self) -> None:
        with self._lock:
            running = [
                f"{name}: {time.monotonic() - began:.0f} s{outcomes(output)}"
                for name, began, output in self._running.values()
            ]
            if running:
                print(f"    {', '.join(running)}", flush=True)


def outcomes(output: int) -> str:
    """What pytest has printed so far, a letter for each test, in words."""
    text = os.pread(output, OUTPUT_BYTES, 0).decode(errors="replace")
    letters = "".join(re.findall(r"^([.FEsxX]+)(?: +\[ *\d+%\])?$", text, re.MULTILINE))
    failed = letters.count("F") + letters.count("E")
    return f", {len(letters)} tests{f', {failed} FAILED' if failed else ''}" if letters else ""


def counts_of(report: Path) -> dict[str, int]:
    """Empty where pytest did not get as far as the end of its report."""
    try:
        found = ElementTree.parse(report).getroot().find("testsuite")
    except (FileNotFoundError, ElementTree.ParseError):
        return {}
    assert found is not None
    total, failures, errors, skipped = (int(found.get(key, "0")) for key in ("tests", "failures", "errors", "skipped"))
    return {"passed": total - failures - errors - skipped, "failed": failures + errors, "skipped": skipped}


def measured_in(report: Path) -> tuple[Measurement, ...]:
    """What tests measured, with its target (tests/support/measuring.py)."""
    try:
        properties = ElementTree.parse(report).getroot().iter("property")
    except (FileNotFoundError, ElementTree.ParseError):
        return ()
    return tuple(json.loads(found.get("value", "")) for found in properties if found.get("name") == "measured")


def failed_of(cache: Path) -> frozenset[str]:
    try:
        return frozenset(json.loads((cache / "v" / "cache" / "lastfailed").read_text()))
    except FileNotFoundError:
        return frozenset()


def worded(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


def print_table(results: Iterable[Result], seconds: float) -> None:
    print(f"\n{'suite':<24} {'tests':<38} {'outcome':<7} {'time':>6}")
    results = list(results)
    rows = [(result.suite.name, result.counts, result.is_failed, result.seconds) for result in results]
    sums = {name: sum(result.counts.get(name, 0) for result in results) for name in ("passed", "failed", "skipped")}
    for name, counts, is_failed, took in [*rows, ("all", sums, any(r.is_failed for r in results), seconds)]:
        outcome = "FAILED" if is_failed else "passed"
        print(f"{name:<24} {worded(counts):<38} {outcome:<7} {int(took) // 60:3}:{int(took) % 60:02}")


def keep_measured(results: Iterable[Result], commit: str) -> None:
    print(f"\n{'measured':<72} {'value':>10} {'target':<16}")
    for result in results:
        kept: SuiteResults = {
            "commit": commit,
            "date": time.strftime("%Y-%m-%d"),
            "seconds": int(result.seconds),
            "tests": result.counts,
            "failed": sorted(result.failed),
            "measured": list(result.measured),
        }
        acceptance_results.keep(result.suite.name, kept)
        for row in result.measured:
            missed = "" if row["is_met"] else "  MISSED"
            print(f"{row['name']:<72.72} {row['value']:>10.4g} {row['target']:<16} {row['unit']}{missed}")
    print(f"kept in {acceptance_results.FILE.relative_to(ROOT)}; `make docs` writes it into the pages")


def print_machine() -> None:
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free_memory = int(memory["MemAvailable"].split()[0]) / (1 << 20)
    free_disk = shutil.disk_usage(tempfile.gettempdir()).free / (1 << 30)
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    print(f"{cores} cores, load {load:.1f}, {free_memory:.1f} GiB of memory and {free_disk:.0f} GiB of disk free")
    if not sandbox.is_possible():
        print("no sandbox, which needs root: tests see other processes of this user, and some are skipped")
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True).stdout.splitlines()
    others = [line.split(None, 2) for line in listed]
    for pid, _, words in (line for line in others if len(line) == 3):
        program = Path(words.split()[0]).name
        is_looked_for = any(name in program or f"/{name}" in words for name in LOOKED_FOR)
        if is_looked_for and not words.startswith("make ") and "tools.run_tests" not in words:
            print(f"already running: {pid} {words[:100]}")
    sys.stdout.flush()


def control_groups() -> set[str]:
    """Suites share them."""
    return {str(path) for path in Path("/sys/fs/cgroup").glob("**/rankscope*")}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ring", choices=("test", "acceptance"))
    parser.add_argument("suite", nargs="?", default="", help="only this one")
    asked = parser.parse_args(arguments)
    is_test = asked.ring == "test"
    rows = TEST_ROWS if is_test else [[[suite]] for suite in ACCEPTANCE]
    if asked.suite:
        rows = [[[suite]] for row in rows for lane in row for suite in lane if suite.name == asked.suite]
        if not rows:
            every = TEST_ROWS if is_test else [[ACCEPTANCE]]
            names = ", ".join(suite.name for row in every for lane in row for suite in lane)
            parser.error(f"no suite {asked.suite!r}; choose one of {names}")
    if not is_test:
        os.environ["RANKSCOPE_ACCEPTANCE"] = "1"
    print_machine()
    began, groups, commit = time.monotonic(), control_groups(), acceptance_results.commit()
    shutil.rmtree(REPORTS, ignore_errors=True)
    REPORTS.mkdir()
    with awake_cores():
        run = Run(REPORTS, IN_TEST if is_test else IN_ACCEPTANCE)
        for lanes in rows:
            run.run_row(lanes)
        if is_test:
            run.run_failed_again()
    print_table(run.results.values(), time.monotonic() - began)
    if not is_test:
        keep_measured(run.results.values(), commit)
    for group in sorted(control_groups() - groups):
        print(f"left behind: control group {group}")
    for name, is_passed in run.run_again.items():
        print(f"{'passed' if is_passed else 'FAILED'} when run again: {name}")
    failed = [result.suite.name for result in run.results.values() if result.is_failed]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
