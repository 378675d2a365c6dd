"""What the rules cost a real Prometheus at 10,000 ranks: time per evaluation, and series per rank with its GPU.

The series are the real exporter's at default settings: of one rank and one GPU of which everything is known, made many.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.reporting import Row, between
from benchmarks.running import ROOT, BenchmarkError, cpu_seconds, memory_bytes, wait_until
from benchmarks.statistics import spread_of
from tools import daemon_samples
from tools.prometheus_binaries import binary

RANKS = 10_000
RANKS_PER_JOB = 500
RANKS_PER_TARGET = 80  # ten nodes of a fleet in one: fewer requests, the same series
STAGES = 4
INTERVAL_SECONDS = 15
# The windows that matter for cost are full by then.
SETTLING_SECONDS = 330.0
READINGS = 6
# A fifth of the interval: the rest is for everybody else's rules, and for evaluation to catch up after a restart.
TARGET_SECONDS = 3.0
GIGABYTE = 1e9
_NOW = b"@@"


def measure(ranks: int = RANKS, settling_seconds: float = SETTLING_SECONDS, readings: int = READINGS) -> list[Row]:
    rank_lines, gpu_lines = template()
    bodies = fleet(rank_lines, gpu_lines, ranks)
    with (
        tempfile.TemporaryDirectory(prefix="rankscope-bench-") as folder,
        serving(bodies) as port,
        prometheus(Path(folder), port, len(bodies)) as (url, process),
    ):
        time.sleep(settling_seconds)
        cpu_before, since = cpu_seconds(process.pid), time.monotonic()
        found = []
        for _ in range(readings):
            time.sleep(INTERVAL_SECONDS)
            found.append(durations(url))
        core_ratio = (cpu_seconds(process.pid) - cpu_before) / (time.monotonic() - since)
        check(url, len(bodies))
        resident = memory_bytes(process.pid, "Rss")
    totals = spread_of([sum(reading.values()) for reading in found])
    slowest = max(found[-1], key=lambda name: found[-1][name])
    group = spread_of([reading[slowest] for reading in found])
    raw = {"ranks": ranks, "groups": found[-1], "prometheus_core_ratio": core_ratio, "prometheus_bytes": resident}
    name = f"rules: {ranks:,} ranks"
    # Prometheus tells how long it took, not what it used: with others on the cores that is their time as well.
    noisy = os.getloadavg()[0] > 2 * len(os.sched_getaffinity(0))
    spread = between(totals.low, totals.high)
    return [
        Row(f"{name}, an evaluation", totals.median, "s", spread, TARGET_SECONDS, raw=raw, noisy=noisy),
        Row(f"{name}, {slowest}", group.median, "s", between(group.low, group.high)),
        Row("rules: series per rank and GPU", len(rank_lines) + len(gpu_lines), "", "", 60, 0),
        Row(f"{name}, Prometheus' CPU", 100 * core_ratio, "% of a core", "", None, 0),
        Row(f"{name}, Prometheus' memory", resident / GIGABYTE, "GB", "", None, 1),
    ]


def template() -> tuple[list[str], list[str]]:
    """Lines of one rank, and of its GPU, as the daemon exports them at default settings."""
    bare = replace(daemon_samples.STATUS, metrics_detail="standard", gpu=daemon_samples.gpu_status())
    status = replace(bare, gpu=daemon_samples.gpu_status(daemon_samples.full_gpu()))
    text = daemon_samples.scrape(daemon_samples.full_rank(), status=status)
    lines = [line for line in text.splitlines() if line and line[0] != "#"]
    ranks = [line for line in lines if 'rank="0"' in line]
    return ranks, [line for line in lines if daemon_samples.gpu_uuid(0) in line and line not in ranks]


def fleet(rank_lines: Sequence[str], gpu_lines: Sequence[str], ranks: int) -> list[bytes]:
    """What each target serves. Counters grow by a second a second; one rank of each job is slow, one GPU in 500 hot."""
    bodies = []
    for first in range(0, ranks, RANKS_PER_TARGET):
        lines = [f'rankscope_build_info{{node="node-{first}",version="0.1.0"}} 1']
        for number in range(first, min(first + RANKS_PER_TARGET, ranks)):
            lines += [rank_line(line, number) for line in rank_lines]
            lines += [gpu_line(line, number) for line in gpu_lines if is_shown(line, number)]
        bodies.append(("\n".join(lines) + "\n").encode())
    bodies[0] += judged_jobs(ranks)
    return bodies


def rank_line(line: str, number: int) -> str:
    job, rank = divmod(number, RANKS_PER_JOB)
    name, value = line.rsplit(" ", 1)
    family = name.partition("{")[0]
    name = re.sub(r'\brun="[^"]*"', f'run="job-{job}"', name).replace('rank="0"', f'rank="{rank}"')
    if family == "rankscope_rank_info":
        stage = rank * STAGES // RANKS_PER_JOB
        for label, text in (
            ("gpu", daemon_samples.gpu_uuid(number)),
            ("node", f"node-{number // 8}"),
            ("run_pod", f"job-{job}-{rank // 8}"),
            ("pipeline", str(stage)),
            ("world_size", str(RANKS_PER_JOB)),
        ):
            name = re.sub(rf'([{{,]){label}="[^"]*"', rf'\1{label}="{text}"', name)
    elif family == "rankscope_rank_stalled":
        value = "0"
    elif family == "rankscope_rank_self_seconds":
        value = "0.2" if rank == 7 else f"{0.1 + 0.00001 * (number % 97):.5f}"
    elif family.endswith("_total"):
        value = _NOW.decode()
    return f"{name} {value}"


def is_shown(line: str, number: int) -> bool:
    """An XID is a rare thing, and has no series before it happens."""
    return "xid_errors" not in line or number % 1000 == 5


def gpu_line(line: str, number: int) -> str:
    name, value = line.rsplit(" ", 1)
    name = name.replace(daemon_samples.gpu_uuid(0), daemon_samples.gpu_uuid(number)).replace(
        "node-a", f"node-{number // 8}"
    )
    if "energy" in name or ('reason="hw_thermal"' in name and number % 500 == 3):
        value = _NOW.decode()
    return f"{name} {value}"


def judged_jobs(ranks: int) -> bytes:
    """Half of the jobs have a verdict, one of them names a rank."""
    lines = []
    for job in range(ranks // RANKS_PER_JOB // 2):
        labels = f'run="job-{job}",run_namespace="team"'
        kind, severity = ("slow_rank", "alarm") if job == 0 else ("healthy", "none")
        lines += [
            f'rankscope_job_verdict{{{labels},verdict="{kind}",severity="{severity}",confidence="high"}} 1',
            f'rankscope_job_ranks{{{labels},state="expected"}} {RANKS_PER_JOB}',
            f'rankscope_job_ranks{{{labels},state="reporting"}} {RANKS_PER_JOB}',
            f"rankscope_job_exposed_communication_ratio{{{labels}}} 0.1",
            f"rankscope_job_mfu_ratio{{{labels}}} 0.45",
        ]
    first = 'run="job-0",run_namespace="team"'
    lines.append(f"rankscope_job_impact_ratio{{{first}}} 0.3")
    culprit = 'rank="7",node="node-0",run_pod="job-0-0",phase="forward",verdict="slow_rank"'
    lines.append(f"rankscope_job_culprit{{{first},{culprit}}} 1")
    return ("\n".join(lines) + "\n").encode()


@contextlib.contextmanager
def serving(bodies: Sequence[bytes]) -> Iterator[int]:
    """Target number N is served at /N."""
    began = time.monotonic()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            now = f"{1000 + time.monotonic() - began:.1f}".encode()
            body = bodies[int(self.path.strip("/"))].replace(_NOW, now)
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def prometheus(folder: Path, port: int, targets: int) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    interval = f"{INTERVAL_SECONDS}s"
    named = [
        {"targets": [f"127.0.0.1:{port}"], "labels": {"__metrics_path__": f"/{number}", "instance": f"n{number}:9464"}}
        for number in range(targets)
    ]
    configuration = {
        "global": {"scrape_interval": interval, "evaluation_interval": interval},
        "rule_files": [str(ROOT / "rules" / name) for name in ("recording.yaml", "alerts.yaml")],
        "scrape_configs": [{"job_name": "rankscope", "static_configs": named}],
    }
    path, log = folder / "prometheus.yml", folder / "log"
    path.write_text(json.dumps(configuration))  # JSON is YAML
    command = [str(binary("prometheus")), f"--config.file={path}", f"--storage.tsdb.path={folder / 'data'}"]
    with log.open("wb") as writing:
        # Port 0: Prometheus says in its log which one it got.
        command += ["--web.listen-address=127.0.0.1:0", "--log.level=info"]
        process = subprocess.Popen(command, stdout=writing, stderr=subprocess.STDOUT, cwd=folder)
    try:

        def listens() -> bool:
            if process.poll() is not None:
                raise BenchmarkError(f"prometheus ended with {process.returncode}: {log.read_text()[-2000:]}")
            return re.search(r"Listening on\W+address=\S+:[1-9]", log.read_text()) is not None

        wait_until(listens, "prometheus listened")
        found = re.search(r"Listening on\W+address=(\S+:[1-9]\d*)", log.read_text())
        assert found is not None
        yield f"http://{found[1]}", process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()
        process.wait()


def own_metrics(url: str) -> dict[tuple[str, str], float]:
    """Prometheus' own series by name and rule group."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {
        (sample.name, sample.labels.get("rule_group", "").rpartition(";")[2]): sample.value
        for family in families
        for sample in family.samples
    }


def durations(url: str) -> dict[str, float]:
    """Seconds of each interval that the last evaluation of each group took: a quarter, if it runs each minute."""
    metrics = own_metrics(url)
    wanted = "prometheus_rule_group_last_duration_seconds"
    interval = "prometheus_rule_group_interval_seconds"
    intervals = {group: value for (name, group), value in metrics.items() if name == interval}
    return {
        group: value * INTERVAL_SECONDS / intervals[group] for (name, group), value in metrics.items() if name == wanted
    }


def check(url: str, targets: int) -> None:
    """The numbers mean nothing if rules failed or had nothing to read."""
    failures = "prometheus_rule_evaluation_failures_total"
    failed = {group: value for (name, group), value in own_metrics(url).items() if name == failures and value}
    if failed:
        raise BenchmarkError(f"{failures}: {failed}")
    for query, least in (("count(up == 1)", targets), ('count(ALERTS{alertname="RankscopeStragglerRank"})', 2)):
        asked = urllib.request.Request(f"{url}/api/v1/query", data=f"query={query}".encode())
        with urllib.request.urlopen(asked, timeout=60) as answer:
            result = json.load(answer)["data"]["result"]
        if not result or float(result[0]["value"][1]) < least:
            raise BenchmarkError(f"{query} is {result}, expected at least {least}; was the machine too busy to scrape?")
