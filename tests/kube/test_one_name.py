"""One run has one name: in the metrics of daemons and operator, in alerts, in their links, on dashboards, and after a
restart. The Prometheus keeps its own labels, as most clusters' do: targets have a `job`, a `namespace` and a `pod`."""

from __future__ import annotations

import json
import time
import urllib.parse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deploy.grafana.dashboards import FOLDER
from rankscope.cli.prometheus_stack import find_rules, hurry, with_links
from tests.alerts.prometheus_running import TARGET_LABELS, Prometheus, running_prometheus
from tests.alerts.test_dashboards import EMPTY, filled, panels
from tests.free_ports import free_port
from tests.kube.api_server import ApiServer, User
from tests.kube.conftest import QUICK
from tests.kube.fleet import OPERATOR_NAMESPACE, Node, TrainingJob, make_namespace
from tests.kube.operator_process import OperatorProcess
from tests.support.waiting import wait_until
from tools.nvml_stub import Script, build_stub

WORKLOAD = "3f0c6f3e-5c8e-4b1e-9d53-0b8f5d4c7a11"
RUN, SLOW, RANKS = "pytorchjob-llama", 2, 4
CLUSTER = TARGET_LABELS["cluster"]
INTERVAL_SECONDS = 2.0
ALERT_SECONDS = 180.0
PATIENCE_SECONDS = 120.0
MEMORY = 1 << 30
# MFU needs to know the FLOPs of a step and the device's peak.
FLOPS = {"RANKSCOPE_FLOPS_PER_STEP": "1G", "RANKSCOPE_PEAK_FLOPS": "100G"}
# Queries without an answer here.
EMPTY_HERE = {
    *EMPTY,
    ("rankscope-rank", "What could not be measured", "A"),  # all is measured
    ("rankscope-daemon", "What could not be measured", "A"),
    ("rankscope-job", "MFU over time", "B"),  # no target is declared
}


@dataclass(frozen=True)
class Cluster:
    server: ApiServer
    namespace: str
    nodes: list[Node]
    scripts: list[Script]
    prometheus: Prometheus
    folder: Path

    def start_job(self, attempt: int) -> TrainingJob:
        folder = self.folder / f"job{attempt}"
        job = TrainingJob(self.server, self.namespace, "llama", self.nodes, folder, slow_rank=SLOW, uid=WORKLOAD)
        job.start()
        for script, pod in zip(self.scripts, job.pods, strict=True):
            pids = [_pid_inside(pid) for pid in (pod.cgroup / "cgroup.procs").read_text().split()]
            script.set({f"gpu.{number}.processes": f"{pid}:{MEMORY}" for number, pid in enumerate(pids)})
        return job

    def firing(self) -> list[dict[str, Any]]:
        """Alerts about runs."""
        return [alert for alert in self.prometheus.alerts() if alert["state"] == "firing" and "run" in alert["labels"]]

    def of_run(self, metric: str) -> str:
        return f'{metric}{{cluster="{CLUSTER}",run_namespace="{self.namespace}",run="{RUN}"}}'


def _pid_inside(pid: str) -> str:
    """The pid by which its node knows a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.split()[-1] for line in lines if line.startswith("NSpid:"))


@pytest.fixture
def cluster(
    server: ApiServer, namespace: str, operator_user: User, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cluster]:
    make_namespace(server, OPERATOR_NAMESPACE)
    for variable, value in FLOPS.items():
        monkeypatch.setenv(variable, value)
    library = build_stub(tmp_path)
    scripts, nodes, targets = [], [], []
    operator = OperatorProcess(operator_user, tmp_path, flags=QUICK)
    try:
        for name in ("node-a", "node-b"):
            script = Script(tmp_path / f"{name}.gpus", gpus=2)
            for variable, value in script.environment(library).items():
                monkeypatch.setenv(variable, value)
            targets.append(f"127.0.0.1:{free_port()}")
            flags = ("--metrics-listen", targets[-1], "--metrics-detail", "full", "--budget-ratio", "1")
            nodes.append(Node(name, tmp_path / name, server, (*flags, "--gpu-interval-seconds", "0.5")))
            nodes[-1].start()
            scripts.append(script)
        operator.start()
        targets.append(urllib.parse.urlsplit(operator.url).netloc)
        rules = []
        for path in find_rules().files:
            rules.append(tmp_path / f"hurried-{path.name}")
            text = with_links(path.read_text(), {"dashboard_url": "https://grafana.mine"})
            rules[-1].write_text(hurry(text, 5, 5 * INTERVAL_SECONDS))
        with running_prometheus(
            tmp_path / "prometheus",
            {"rankscope": targets},
            rules=rules,
            interval_seconds=INTERVAL_SECONDS,
        ) as prometheus:
            yield Cluster(server, namespace, nodes, scripts, prometheus, tmp_path)
    finally:
        operator.stop()
        print(operator.log[-8000:], *(node.log[-4000:] for node in nodes), sep="\n")  # shown if the test failed
        for node in nodes:
            node.stop()
            server.admin.delete(f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/pods/{node.pod_name}?gracePeriodSeconds=0")


def capture(cluster: Cluster) -> None:
    path = f"/apis/rankscope.dev/v1alpha1/namespaces/{cluster.namespace}/captures"
    body = {"apiVersion": "rankscope.dev/v1alpha1", "kind": "Capture", "metadata": {"name": "c"}}
    cluster.server.admin.create(path, body | {"spec": {"run": RUN, "ranks": "straggler+peer", "steps": 2}})

    def is_over() -> bool:
        return cluster.server.admin.get(f"{path}/c").get("status", {}).get("phase") in ("Succeeded", "Failed")

    wait_until(is_over, seconds=240.0)


def empty_queries(where: Cluster, path: Path, **variables: str) -> set[tuple[str, str, str]]:
    """Of a dashboard: those without a series in the last minute and a half."""
    chosen = dict.fromkeys(("node", "instance", "gpu"), ".*") | {"rank": str(SLOW), "rows": "16"}
    chosen |= {"cluster": CLUSTER, "run_namespace": where.namespace, "run": RUN} | variables
    return {
        (path.stem, panel["title"], target["refId"])
        for panel in panels(path)
        for target in panel["targets"]
        if not where.prometheus.query_range(filled(target["expr"], **chosen), seconds=90, step_seconds=3)
    }


def wait_for_answers(where: Cluster, paths: Iterable[Path], **variables: str) -> None:
    """Until every query of these dashboards has an answer, but for those that can have none here."""
    give_up_at = time.monotonic() + PATIENCE_SECONDS
    while empty := {query for path in paths for query in empty_queries(where, path, **variables)} - EMPTY_HERE:
        assert time.monotonic() < give_up_at, empty
        time.sleep(2)


@pytest.mark.acceptance
@pytest.mark.timeout(900)
def test_one_alert_links_to_the_run_whose_name_survives_restarts(
    cluster: Cluster,
) -> None:
    job = cluster.start_job(0)
    try:
        wait_until(cluster.firing, seconds=ALERT_SECONDS)
        capture(cluster)
        (alert,) = cluster.firing()
        labels = alert["labels"]
        assert (labels["alertname"], labels["rank"], labels["node"]) == ("RankscopeStragglerRank", str(SLOW), "node-b")
        assert (labels["cluster"], labels["run_namespace"], labels["run"]) == (CLUSTER, cluster.namespace, RUN)

        for script in cluster.scripts:  # an alert of its own; and something for the panel of errors
            script.set({"xids": "0:31", "gpu.ecc.volatile.uncorrected": 0})
        link = urllib.parse.urlsplit(alert["annotations"]["dashboard_url"])
        linked = {key.removeprefix("var-"): value for key, value in urllib.parse.parse_qsl(link.query)}
        assert linked.items() >= {"run": RUN, "run_namespace": cluster.namespace, "rank": str(SLOW)}.items()
        dashboards = {json.loads(path.read_text())["uid"]: path for path in FOLDER.glob("*.json")}
        wait_for_answers(cluster, [dashboards[link.path.split("/")[2]]], **linked)
        wait_for_answers(cluster, dashboards.values())
        slow = [each for each in cluster.firing() if each["labels"]["alertname"] == labels["alertname"]]
        assert len(slow) == 1  # still
    finally:
        job.stop()
    for pod in job.pods:
        cluster.server.admin.delete(f"/api/v1/namespaces/{cluster.namespace}/pods/{pod.name}?gracePeriodSeconds=0")
    steps = cluster.of_run("rankscope_rank_steps_total")
    wait_until(lambda: not cluster.prometheus.query(steps), seconds=PATIENCE_SECONDS)
    job = cluster.start_job(1)
    try:
        wait_until(lambda: len(cluster.prometheus.query(steps)) == RANKS, seconds=PATIENCE_SECONDS)
        names = {(s.labels["run_namespace"], s.labels["run"]) for s in cluster.prometheus.query("rankscope_rank_info")}
        assert names == {(cluster.namespace, RUN)}
        info = cluster.of_run("rankscope_rank_info")
        wait_until(
            lambda: [s.labels["attempt"] for s in cluster.prometheus.query(info)] == ["1"] * RANKS,
            seconds=PATIENCE_SECONDS,
        )
    finally:
        job.stop()
