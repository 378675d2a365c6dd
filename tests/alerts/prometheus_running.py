"""A real Prometheus of a test's own: on a free port, with the targets, rules and Alertmanagers that it is given."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankscope.common.run_names import run_labels
from tests.free_ports import free_port
from tests.support.waiting import wait_until
from tools.prometheus_binaries import binary

PATIENCE_SECONDS = 240.0
_PORT_ATTEMPTS = 3
TARGET_LABELS = {"namespace": "monitoring", "pod": "daemon-x7k2p", "container": "daemon", "cluster": "east"}


def run_matchers(name: str) -> str:
    """PromQL matchers of a run's series."""
    return ",".join(f'{label}="{value}"' for label, value in run_labels(name).items())


class QueryRefusedError(Exception):
    """Prometheus did not like the query; the text is its own."""


@dataclass(frozen=True)
class Sample:
    """One series of an instant query."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Prometheus:
    process: subprocess.Popen[bytes]
    url: str  # http://127.0.0.1:PORT
    log_path: Path

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def query(self, expression: str) -> list[Sample]:
        """An instant vector, or a scalar as one sample without labels."""
        data = self._get("query", query=expression)
        if data["resultType"] == "scalar":
            return [Sample({}, float(data["result"][1]))]
        return [Sample(series["metric"], float(series["value"][1])) for series in data["result"]]

    def query_range(self, expression: str, seconds: float = 60.0, step_seconds: float = 1.0) -> list[dict[str, Any]]:
        """Series of the last `seconds`, as the HTTP API gives them."""
        end = time.time()
        wanted = {"query": expression, "start": f"{end - seconds:.3f}", "end": f"{end:.3f}", "step": f"{step_seconds}"}
        series: list[dict[str, Any]] = self._get("query_range", **wanted)["result"]
        return series

    def alerts(self) -> list[dict[str, Any]]:
        """Pending and firing ones: `labels`, `annotations`, `state`."""
        alerts: list[dict[str, Any]] = self._get("alerts")["alerts"]
        return alerts

    def label_values(self, label: str, *matchers: str) -> list[str]:
        query = [("match[]", matcher) for matcher in matchers]
        values: list[str] = self._ask(f"label/{label}/values?{urllib.parse.urlencode(query)}")
        return values

    def wait_for_data(self, expression: str, seconds: float = PATIENCE_SECONDS) -> list[Sample]:
        """The first answer that is not empty."""
        return wait_until(
            lambda: self.query(expression), lambda: f"{expression}: no data; {self._get('targets')}", seconds
        )

    def _get(self, path: str, **query: str) -> Any:
        return self._ask(f"{path}?{urllib.parse.urlencode(query)}")

    def _ask(self, path: str) -> Any:
        assert self.process.poll() is None, f"prometheus ended with {self.process.returncode}:\n{self.log}"
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}", timeout=PATIENCE_SECONDS) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise QueryRefusedError(f"{path}: {error.read().decode(errors='replace')}") from error


def backfill(folder: Path, lines: Iterable[str]) -> None:
    """Lines of OpenMetrics, as blocks of the Prometheus that `running_prometheus` starts in this folder."""
    written = folder / "history.txt"
    written.write_text("\n".join(lines) + "\n")
    blocks = ["tsdb", "create-blocks-from", "openmetrics", str(written), str(folder / "data")]
    subprocess.run([str(binary("promtool")), *blocks], check=True, stdout=subprocess.DEVNULL)


@contextmanager
def running_prometheus(
    folder: Path,
    targets: Mapping[str, Sequence[str]],
    *,
    rules: Sequence[Path] = (),
    alertmanagers: Sequence[str] = (),
    interval_seconds: float = 1.0,
) -> Iterator[Prometheus]:
    """`targets`: scrape job to addresses (host:port). They have the labels that Prometheus gives targets in a cluster.
    Ready when this yields."""
    folder.mkdir(parents=True, exist_ok=True)
    interval = f"{round(interval_seconds * 1000)}ms"
    configuration = {
        "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
        "rule_files": [str(path.resolve()) for path in rules],
        "scrape_configs": [
            {"job_name": name, "static_configs": [{"targets": list(addresses), "labels": TARGET_LABELS}]}
            for name, addresses in targets.items()
        ],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": list(alertmanagers)}]}]},
    }
    path = folder / "prometheus.yml"
    path.write_text(json.dumps(configuration, indent=2))  # JSON is YAML
    prometheus = _start(folder, path)
    try:
        yield prometheus
    finally:
        prometheus.process.terminate()
        try:
            prometheus.process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            prometheus.process.kill()
            prometheus.process.wait()


def _start(folder: Path, configuration: Path) -> Prometheus:
    log_path = folder / "prometheus.log"
    for _ in range(_PORT_ATTEMPTS):
        address = f"127.0.0.1:{free_port()}"
        command = [str(binary("prometheus")), f"--config.file={configuration}", f"--web.listen-address={address}"]
        command += [f"--storage.tsdb.path={folder / 'data'}", "--log.level=warn"]
        with log_path.open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
        prometheus = Prometheus(process, f"http://{address}", log_path)
        try:
            if _is_ready_in_time(prometheus):
                return prometheus
        except BaseException:
            process.kill()
            process.wait()
            raise
        if "address already in use" not in prometheus.log:
            break
    raise AssertionError(f"prometheus did not start:\n{prometheus.log}")


def _is_ready_in_time(prometheus: Prometheus) -> bool:
    """False if it ended instead."""

    def is_ready_or_ended() -> bool:
        if prometheus.process.poll() is not None:
            return True
        try:
            with urllib.request.urlopen(f"{prometheus.url}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    wait_until(is_ready_or_ended, lambda: f"prometheus is not ready:\n{prometheus.log}", PATIENCE_SECONDS)
    return prometheus.process.poll() is None
