"""A `rankscope` process that serves, as tests see it: its log, its metrics, its health."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from rankscope.common.run_names import run_labels, run_name
from tests.support.waiting import wait_until

PATIENCE_SECONDS = 180.0
MAIN: tuple[str, ...] = (sys.executable, "-m", "rankscope.cli.main")
ANNOUNCED = re.compile(
    r"^rankscope (?:daemon|up): metrics (http://127\.0\.0\.1:\d+/metrics), grpc (unix:[^\s,]+)", re.M
)


def run_of(labels: Mapping[str, str]) -> str:
    """The run that a series is about; empty if it is about none."""
    return run_name(labels.get("run_namespace", ""), labels.get("run", ""))


@dataclass(frozen=True)
class Serving:
    process: subprocess.Popen[str] | subprocess.Popen[bytes]
    metrics_url: str
    grpc_target: str
    log_path: Path
    output_path: Path

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def output(self) -> str:
        return self.output_path.read_text(errors="replace")

    def scrape(self) -> list[tuple[str, Mapping[str, str], float]]:
        """Every sample, read by Prometheus' own parser: a scrape that it refuses is a failure of every test."""
        with urllib.request.urlopen(self.metrics_url, timeout=PATIENCE_SECONDS) as answer:
            text = answer.read().decode()
        families = text_string_to_metric_families(text)
        return [(sample.name, sample.labels, sample.value) for family in families for sample in family.samples]

    def values(self, name: str, **labels: str) -> list[float]:
        wanted = labels.items()
        return [value for found, theirs, value in self.scrape() if found == name and wanted <= theirs.items()]

    def value(self, name: str, **labels: str) -> float | None:
        """The only sample of that name and those labels; None if there is none."""
        values = self.values(name, **labels)
        assert len(values) <= 1, (name, labels, values)
        return values[0] if values else None

    def steps(self, job: str, rank: int) -> float:
        return self.value("rankscope_rank_steps_total", **run_labels(job), rank=str(rank)) or 0.0

    def kinds(self, job: str, rank: int, source: str) -> set[str]:
        """The kinds of problem that the rank has with this source right now."""
        who = {**run_labels(job), "rank": str(rank), "source": source}.items()
        samples = self.scrape()
        return {
            their["kind"] for name, their, _ in samples if name == "rankscope_rank_problem" and who <= their.items()
        }

    def is_healthy(self) -> bool:
        url = self.metrics_url.replace("/metrics", "/healthz")
        with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as answer:
            return self.process.poll() is None and int(answer.status) == 200

    def wait_until(self, condition: Callable[[], object]) -> None:
        wait_until(condition, self._describe)

    def wait_for_words(self, *words: str) -> None:
        """Until the log holds all of them: a window's metrics are out before its problems are logged."""
        self.wait_until(lambda: all(text in self.log for text in words))

    def _describe(self) -> str:
        if self.process.poll() is not None:
            return f"{self.log}\nit has ended with {self.process.returncode}"
        telling = ("rankscope_daemon_", "rankscope_rank_problem", "rankscope_rank_steps_total")
        samples = [f"{name} {labels} {value}" for name, labels, value in self.scrape() if name.startswith(telling)]
        return "\n".join([self.log, *samples])


@contextmanager
def serving(
    folder: Path,
    subcommand: str,
    *flags: str,
    launcher: Sequence[str] = MAIN,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Serving]:
    folder.mkdir(parents=True, exist_ok=True)
    log_path, output_path = folder / "log", folder / "output"
    settings = ("--metrics-listen", "127.0.0.1:0", "--socket", str(folder / "s" / "d.sock"), "--window-seconds", "0.5")
    folders = ("--capture-dir", str(folder / "captures"), "--profile-dir", str(folder / "profiles"))
    command = [*launcher, subcommand, *settings, *folders, *flags]
    with log_path.open("w") as log, output_path.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=log, text=True, env={**os.environ, **(environment or {})}
        )
    try:
        wait_until(
            lambda: process.poll() is not None or ANNOUNCED.search(log_path.read_text()),
            lambda: log_path.read_text(),
        )
        announced = ANNOUNCED.search(log_path.read_text())
        assert announced is not None, log_path.read_text()
        yield Serving(process, announced[1], announced[2], log_path, output_path)
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
