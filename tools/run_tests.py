"""`make test`: all suites, what only computes beside what mostly waits, and at the end a table of what took how long.

Training jobs and Prometheus need both cores: they come one after the other. What suites that run side by side print is
shown when each has ended, so that a failure reads as it would alone."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRESS_SECONDS = 30.0


@dataclass(frozen=True)
class Suite:
    name: str
    command: tuple[str, ...]


def tests(name: str, folder: str, *options: str) -> Suite:
    return Suite(name, (sys.executable, "-m", "pytest", "-q", "--durations=5", *options, f"tests/{folder}"))


Lane = tuple[Suite, ...]
# Built once, six minutes; whoever comes second waits for it.
API_SERVER = Suite("an API server", ("tools/setup_kube.sh",))
HELM = Suite("helm", ("tools/setup_helm.sh",))
# One row comes after the other, the lanes of a row run side by side, the suites of a lane one by one.
ROWS: tuple[tuple[Lane, ...], ...] = (
    (
        (tests("unit tests", "unit"), tests("fuzz targets, a short run", "fuzz"), tests("attackers", "security")),
        (HELM, API_SERVER, tests("chart", "ship"), tests("images, without an engine", "images")),
        (API_SERVER, tests("operator on a real API server", "kube")),
    ),
    ((tests("integration tests (real processes)", "integration"),),),
    ((tests("end-to-end tests (real training jobs)", "e2e"),),),
    ((tests("a few frameworks (real training jobs)", "frameworks", "-m", "representative"),),),
    ((tests("alerts and dashboards (a real Prometheus)", "alerts"),),),
)


@dataclass
class Run:
    ended: list[tuple[Suite, int, float]] = field(default_factory=list)
    running: dict[int, tuple[str, float]] = field(default_factory=dict)  # by lane
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def failed(self) -> list[str]:
        return [suite.name for suite, status, _ in self.ended if status]

    def do_row(self, lanes: tuple[Lane, ...]) -> None:
        alone = len(lanes) == 1
        threads = [threading.Thread(target=self._do_lane, args=(lane, alone)) for lane in lanes]
        for thread in threads:
            thread.start()
        said = time.monotonic()
        for thread in threads:
            while thread.is_alive():
                thread.join(timeout=1)
                if not alone and time.monotonic() - said > PROGRESS_SECONDS:
                    said = time.monotonic()
                    self._say_progress()

    def _do_lane(self, lane: Lane, alone: bool) -> None:
        for suite in lane:
            began = time.monotonic()
            with self.lock:
                self.running[id(lane)] = (suite.name, began)
                print(f"==> {suite.name}", flush=True)
            status = self._call(suite, alone)
            with self.lock:
                del self.running[id(lane)]
                self.ended.append((suite, status, time.monotonic() - began))
            if status:
                return

    def _call(self, suite: Suite, alone: bool) -> int:
        if alone:
            return subprocess.run(suite.command, cwd=ROOT).returncode
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
            status = subprocess.run(suite.command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT).returncode
            output.seek(0)
            with self.lock:
                print(f"==> {suite.name}: what it printed\n{output.read().rstrip()}", flush=True)
            return status

    def _say_progress(self) -> None:
        with self.lock:
            now = time.monotonic()
            told = [f"{name}: {now - began:.0f} s" for name, began in self.running.values()]
            print(f"    {', '.join(told)}", flush=True)

    def say_table(self) -> None:
        print("==> what took how long")
        for suite, status, seconds in self.ended:
            print(f"    {int(seconds) // 60:3}:{int(seconds) % 60:02}  {suite.name}{'  FAILED' if status else ''}")


def main() -> int:
    run = Run()
    for row in ROWS:
        run.do_row(row)
        if run.failed:
            break
    run.say_table()
    if run.failed:
        print(f"failed: {', '.join(run.failed)}", file=sys.stderr)
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
