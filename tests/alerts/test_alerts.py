"""From a real job with a real fault to a page and a capture: daemon, Prometheus, our rules, Alertmanager, webhooks.

The rules are those that ship, in a hurry (see rankscope.cli.prometheus_stack): a test cannot wait for minutes. A
healthy job runs beside all of it and must be mentioned nowhere."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from rankscope.cli.demo_job.faults import parse_fault
from rankscope.cli.demo_job.launcher import DemoJob
from rankscope.common.run_names import run_labels
from tests.alerts.admitting import ProcView
from tests.alerts.hearing import Heard, Hearing, hearing
from tests.alerts.prometheus_running import run_matchers
from tests.integration.daemon_process import MAIN, PATIENCE_SECONDS, Serving, serving
from tests.support.waiting import wait_until
from tools.prometheus_binaries import binary

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(600)]

START_SECONDS = 180.0
ALERT_SECONDS = 180.0
HEALTHY_SECONDS = 180.0
# Scrapes time out after an interval: on a busy machine, one of a second does.
HURRY = ("--prometheus-interval", "2", "--hurry", "5")


@dataclass(frozen=True)
class Stack:
    up: Serving
    hearing: Hearing
    prometheus_url: str
    processes: ProcView

    def query(self, expression: str) -> list[dict[str, Any]]:
        url = f"{self.prometheus_url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return found

    def captures(self, job: str) -> list[dict[str, Any]]:
        command = [*MAIN, "captures", "ls", "--connect", self.up.grpc_target, "--run", job, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
        assert done.returncode == 0, done.stderr
        captures: list[dict[str, Any]] = json.loads(done.stdout)["captures"]
        return captures

    def wait_until(self, condition: Any, job: DemoJob) -> None:
        wait_until(lambda: self._check(job) and condition(), lambda: self._describe(job), ALERT_SECONDS)

    def _check(self, job: DemoJob) -> bool:
        assert self.up.process.poll() is None, self.up.log
        assert not job.poll(), job.log_tail(job.poll()[0][0])
        return True

    def _describe(self, job: DemoJob) -> str:
        ours = self.query(f'{{__name__=~"ALERTS|rankscope_job_.*",{run_matchers(job.job_name)}}}')
        series = [f"{each['metric']} {each['value'][1]}" for each in ours]
        return "\n".join([str(self.hearing), *series, self.up.output, self.up.log[-6000:]])

    def wait_for_page(self, job: DemoJob, name: str) -> Heard:
        self.wait_until(lambda: self.hearing.of(job.job_name, name), job)
        return self.hearing.of(job.job_name, name)[0]

    def description(self, alert: Heard) -> str:
        """As it is now: the verdict may name a line later than it names the rank."""
        with urllib.request.urlopen(f"{self.prometheus_url}/api/v1/alerts", timeout=PATIENCE_SECONDS) as answer:
            firing = json.load(answer)["data"]["alerts"]
        ours = [each for each in firing if each["labels"].items() >= alert.labels.items()]
        return "".join(each["annotations"]["description"] for each in ours)

    def wait_until_resolved(self, job: DemoJob, name: str) -> None:
        self.wait_until(lambda: self.hearing.of(job.job_name, name, "resolved"), job)
        expression = f'ALERTS{{alertname="{name}",{run_matchers(job.job_name)}}}'
        self.wait_until(lambda: not self.query(expression), job)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("alerts")
    binary("alertmanager")  # gets all of them if need be
    # Alerts cause captures: real jobs on the developer's machine must not have any.
    processes = ProcView(folder / "proc")
    flags = ("--prometheus", *HURRY, "--window-seconds", "2", "--proc-root", str(processes.folder))
    with hearing() as heard, serving(folder, "up", *flags, "--alerts-webhook", heard.url) as up:
        announced = re.search(r"prometheus (http://127\.0\.0\.1:\d+)", up.log)
        assert announced is not None, up.log
        yield Stack(up, heard, announced[1], processes)


@dataclass(frozen=True)
class Jobs:
    """All start together: what starts later would disturb the ones that run, on a machine of two cores for seconds."""

    slow_rank: DemoJob
    slow_network: DemoJob
    hang: DemoJob
    healthy: DemoJob
    since_monotonic: float


@pytest.fixture(scope="module")
def jobs(stack: Stack) -> Iterator[Jobs]:
    # Four ranks on a busy machine of two cores do wait for each other a third of the time, fault or not; two do not.
    wanted = {"slow-rank:rank=2,delay=60": 4, "slow-network": 2, "hang:rank=1": 2, "none": 2}
    with ExitStack() as running:
        made = [running.enter_context(DemoJob(n, parse_fault(fault), probe=True)) for fault, n in wanted.items()]
        for job in made:
            job.start()
        for job in made:
            job.wait_until_training(START_SECONDS)
            stack.processes.admit(job.pids)
        yield Jobs(*made, since_monotonic=time.monotonic())


@pytest.fixture(scope="module")
def faulty(stack: Stack, jobs: Jobs) -> Jobs:
    """With every fault begun, in jobs that have been healthy for long enough to have a past. All at once: what pages
    and resolves takes minutes of waiting, which they can do together."""
    broken = (jobs.slow_rank, jobs.slow_network, jobs.hang)
    for job in broken:
        judged = f'rankscope_job_verdict{{{run_matchers(job.job_name)},verdict="healthy"}}'
        stack.wait_until(lambda judged=judged: stack.query(f"count_over_time({judged}[5m]) >= 6"), job)
    for job in broken:
        job.start_fault()
    return jobs


@contextmanager
def ending(job: DemoJob) -> Iterator[DemoJob]:
    """Ends the job when the test has seen enough of it: others need the CPU."""
    yield job
    job.stop()


def check_links(stack: Stack, alert: Heard) -> None:
    """To the console's page of the run or rank; none to a runbook or a dashboard, whose addresses are not known."""
    assert alert.annotations["summary"]
    assert not {"runbook_url", "dashboard_url"} & alert.annotations.keys()
    console, _, asked = alert.annotations["console_url"].partition("?")
    path = "rank" if "rank" in urllib.parse.parse_qs(asked) else "run"
    with urllib.request.urlopen(f"{console}api/v1/{path}?{asked}", timeout=PATIENCE_SECONDS) as answer:
        shown = json.load(answer)
    assert run_labels(shown["run"])["run"] == alert.labels["run"]
    assert path == "run" or str(shown["rank"]) == alert.labels["rank"]


def captures_because_of(stack: Stack, job: DemoJob, alert: str) -> list[dict[str, Any]]:
    return [capture for capture in stack.captures(job.job_name) if alert in capture["reason"]]


def captures_with(stack: Stack, job: DemoJob, rank: int) -> list[dict[str, Any]]:
    """Those that an alert caused, whichever: the job's exposed communication, a symptom, may be told a moment earlier
    than the rank behind it, and its capture is of that rank if the verdict has named it by then."""
    captures = captures_because_of(stack, job, "alert ")
    return [capture for capture in captures if rank in [each["rank"] for each in capture["ranks"]]]


def wait_for_capture(stack: Stack, job: DemoJob, find: Callable[[], list[dict[str, Any]]]) -> dict[str, Any]:
    """The latest that is found, delivered by all its ranks."""
    final = ("analysed", "failed", "cancelled")
    stack.wait_until(lambda: [each for each in find() if each["state"] in final], job)
    capture = next(each for each in find() if each["state"] in final)
    assert capture["reason"].startswith("alert "), capture
    assert capture["state"] == "analysed", capture
    assert {rank["state"] for rank in capture["ranks"]} == {"analysed"}, capture
    return capture


def test_a_straggler_pages_is_captured_with_a_peer_and_resolves(stack: Stack, faulty: Jobs) -> None:
    with ending(faulty.slow_rank) as job:
        alert = stack.wait_for_page(job, "RankscopeStragglerRank")
        assert alert.labels["rank"] == "2"
        assert alert.labels["severity"] == "critical"
        assert alert.annotations["phase"] == "forward"
        assert "GPU-hours" in alert.annotations["description"]
        check_links(stack, alert)
        slow = f'ALERTS{{alertname="RankscopeStragglerRank",{run_matchers(job.job_name)},alertstate="firing"}}'
        stack.wait_until(lambda: stack.query(slow), job)
        assert len(stack.query(slow)) == 1, "one slow rank is one alert"
        stack.wait_until(lambda: re.search(r", at \w+\.py:\d+ \(\w+\); ", stack.description(alert)), job)
        capture = wait_for_capture(stack, job, lambda: captures_with(stack, job, 2))
        ranks = [rank["rank"] for rank in capture["ranks"]]
        assert len(ranks) == 2
        assert 2 in ranks
        job.end_fault()
        stack.wait_until_resolved(job, "RankscopeStragglerRank")
        assert {each["metric"]["evidence"] for each in stack.query(f"last_over_time({slow}[1h])")} == {"verdict"}
        # Repeated notifications of one firing have made no second capture, and no innocent rank was paged for.
        assert len(captures_because_of(stack, job, "RankscopeStragglerRank")) <= 1
        assert len(captures_because_of(stack, job, "alert ")) <= 2
        assert {heard.labels["rank"] for heard in stack.hearing.of(job.job_name, "RankscopeStragglerRank")} == {"2"}


def test_exposed_communication_pages_for_the_job_is_captured_and_resolves(stack: Stack, faulty: Jobs) -> None:
    with ending(faulty.slow_network) as job:
        alert = stack.wait_for_page(job, "RankscopeExposedCommunication")
        assert "rank" not in alert.labels
        check_links(stack, alert)
        capture = wait_for_capture(stack, job, lambda: captures_because_of(stack, job, "Communication"))
        assert len(capture["ranks"]) == 2
        job.end_fault()
        stack.wait_until_resolved(job, "RankscopeExposedCommunication")


def test_a_hang_pages_with_the_awaited_rank_and_resolves(stack: Stack, faulty: Jobs) -> None:
    with ending(faulty.hang) as job:
        alert = stack.wait_for_page(job, "RankscopeHang")
        assert alert.labels["severity"] == "critical"
        assert re.search(r"\brank 1 \(", alert.annotations["description"]), alert
        check_links(stack, alert)
        job.end_fault()
        stack.wait_until_resolved(job, "RankscopeHang")
        assert captures_because_of(stack, job, "RankscopeHang") == []  # it has no steps to record


def test_a_healthy_job_of_three_minutes_is_mentioned_nowhere(stack: Stack, jobs: Jobs) -> None:
    until = jobs.since_monotonic + HEALTHY_SECONDS
    wait_until(lambda: time.monotonic() > until, lambda: "", HEALTHY_SECONDS + 10)
    name = jobs.healthy.job_name
    assert jobs.healthy.poll() == []
    assert stack.query(f"last_over_time(rankscope_job_verdict{{{run_matchers(name)}}}[1m])")
    fired = stack.query(f'count_over_time(ALERTS{{{run_matchers(name)},alertstate="firing"}}[1h])')
    assert not fired, f"{fired}\n{stack.up.output}"
    assert not stack.hearing.of(name)
    assert stack.captures(name) == []


def test_prometheus_evaluated_every_rule_without_an_error(stack: Stack) -> None:
    with urllib.request.urlopen(f"{stack.prometheus_url}/api/v1/rules", timeout=PATIENCE_SECONDS) as answer:
        groups = json.load(answer)["data"]["groups"]
    assert {rule["type"] for group in groups for rule in group["rules"]} == {"alerting", "recording"}
    assert not [
        (rule["name"], rule["lastError"]) for group in groups for rule in group["rules"] if rule.get("lastError")
    ]
