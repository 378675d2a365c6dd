"""A tenant with every right in their own namespace writes the status of their Captures. The webhooks that guard the
status are not installed here: nothing that somebody wrote there may lead to another namespace."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from rankscope.v1 import capture_service_pb2 as pb
from rankscope.v1.capture_service_pb2_grpc import CaptureServiceStub
from tests.certificates import Authority
from tests.kube.accounts import granted
from tests.kube.api_server import ApiServer, User
from tests.kube.conftest import QUICK
from tests.kube.operator_process import OperatorProcess
from tests.kube.scripted_daemon import ScriptedDaemon, Spoken
from tests.kube.scripted_run import BASE, ScriptedRun
from tests.kube.test_user_api import CALL_SECONDS, NAME, account, refused, token_of
from tests.support.waiting import wait_until

TEAM, OTHERS = "forgery-team", "forgery-thief"
RBAC = "/apis/rbac.authorization.k8s.io/v1/namespaces"
Code = grpc.StatusCode


@dataclass
class Scene:
    server: ApiServer
    daemon: ScriptedDaemon  # of the node that both tenants share
    victim: ScriptedRun
    thief: ScriptedRun
    mallory: User
    calls: CaptureServiceStub  # of mallory

    def id_of(self, path: str) -> str:
        return f"k-{self.server.admin.get(path)['metadata']['uid']}"

    def make_capture(self, name: str, run: str, **spec: Any) -> str:
        body = {"apiVersion": "rankscope.dev/v1alpha1", "kind": "Capture", "metadata": {"name": name}}
        wanted = {"run": run, "ranks": "0", "steps": 3, "patienceSeconds": 600, **spec}
        self.mallory.create(f"{BASE}/{self.thief.namespace}/captures", {**body, "spec": wanted})
        return f"{BASE}/{self.thief.namespace}/captures/{name}"

    def forge(self, path: str, capture_id: str, phase: str, state: str) -> None:
        """Mallory's own object, as if it were a capture of the victim's job on the victim's node."""
        wait_until(lambda: self.server.admin.get(path).get("status", {}).get("phase") == "Pending")
        status = {
            "phase": phase,
            "job": self.victim.job,
            "captureId": capture_id,
            "startUnixMs": round((time.time() + 8) * 1000),
            "ranks": [{"rank": 0, "node": self.daemon.node, "pod": self.victim.pod_name(0), "state": state}],
        }
        self.mallory.merge(f"{path}/status", {"status": status})


@pytest.fixture(scope="module")
def scene(server: ApiServer, operator_user: User, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("forgery")
    for namespace in (TEAM, OTHERS):
        server.admin.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
    account(server, OTHERS, "mallory")
    everything = {"rules": [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]}
    server.admin.create(f"{RBAC}/{OTHERS}/roles", {"metadata": {"name": "all"}, **everything})
    binding = {
        "metadata": {"name": "all"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "all"},
        "subjects": [{"kind": "ServiceAccount", "name": "mallory", "namespace": OTHERS}],
    }
    server.admin.create(f"{RBAC}/{OTHERS}/rolebindings", binding)
    authority = Authority(folder / "authority")
    pair = authority.issue("api", NAME)
    flags = ("--api-listen", "127.0.0.1:0", "--api-certificate", str(pair.certificate), "--api-key", str(pair.key))
    operator = OperatorProcess(operator_user, folder, "forgery-0", (*QUICK, *flags))
    daemon = ScriptedDaemon(server, "forgery-shared")
    daemon.start()
    victim = ScriptedRun(server, TEAM, "secret", [daemon])
    # Mallory's processes have the victim's MASTER_ADDR and run id: one name for two jobs on the node.
    thief = ScriptedRun(server, OTHERS, "mine", [daemon], job=victim.job)
    try:
        victim.start()
        thief.pods.append(thief.make_pod(0))
        daemon.ranks = [*daemon.ranks, *(Spoken(thief.pods[0], rank, 2, thief.job) for rank in (0, 1))]
        with granted(server, "api"):
            operator.start()
            address = operator.log.rpartition(" api ")[2].split()[0]
            for run in (victim, thief):
                wait_until(lambda run=run: run.status.get("ranks", {}).get("seen") == 2)
            credentials = grpc.composite_channel_credentials(
                grpc.ssl_channel_credentials(authority.certificate.read_bytes()),
                grpc.access_token_call_credentials(token_of(server, OTHERS, "mallory", "rankscope")),
            )
            with grpc.secure_channel(address, credentials, [("grpc.ssl_target_name_override", NAME)]) as channel:
                mallory = User(server, "mallory", token_of(server, OTHERS, "mallory"))
                yield Scene(server, daemon, victim, thief, mallory, CaptureServiceStub(channel))
    finally:
        operator.stop()
        daemon.stop()


def test_a_forged_status_affects_nothing_in_another_namespace(scene: Scene) -> None:
    server, daemon, thief = scene.server, scene.daemon, scene.thief
    theirs = scene.victim.make_capture("theirs", ranks="0")
    victims = scene.id_of(theirs)
    wait_until(lambda: victims in daemon.captures)

    # A capture of the victim's job that nobody of the victim's asked for.
    taken = scene.make_capture("taken", "none")
    scene.forge(taken, "stolen", "Running", "accepted")
    # The victim's capture, under Mallory's name: to cancel it, to read it, to delete it.
    held = scene.make_capture("held", "none", deleteArtifacts=True)
    scene.mallory.merge(held, {"metadata": {"finalizers": ["rankscope.dev/capture"]}})
    scene.forge(held, victims, "Running", "running")
    scene.mallory.delete(held)
    wait_until(lambda: not server.admin.is_served(held))
    assert scene.victim.finished_capture(theirs)["phase"] == "Succeeded"
    read = scene.make_capture("read", "none", deleteArtifacts=True)
    scene.forge(read, victims, "Succeeded", "analysed")
    name = f"{thief.namespace}/read"
    seen: list[pb.Capture] = []

    def is_seen_as_forged() -> bool:
        seen[:] = [scene.calls.GetCapture(pb.GetCaptureRequest(id=name), timeout=CALL_SECONDS).capture]
        return seen[0].state == pb.CAPTURE_STATE_ANALYSED

    wait_until(is_seen_as_forged)
    assert not seen[0].ranks[0].HasField("summary")
    wanted = pb.DownloadArtifactRequest(id=name, rank=0)
    assert refused(lambda: list(scene.calls.DownloadArtifact(wanted, timeout=CALL_SECONDS)))[0] is Code.NOT_FOUND
    scene.calls.DeleteCapture(pb.DeleteCaptureRequest(id=name), timeout=CALL_SECONDS)
    wait_until(lambda: not server.admin.is_served(read))

    assert thief.finished_capture(taken)["phase"] == "Failed"
    assert [request.id for request in daemon.starts] == [victims]
    assert victims not in daemon.cancelled and victims not in daemon.deleted
    assert list(daemon.captures) == [victims]


def test_captures_name_their_own_runs_pods_despite_equal_job_names(scene: Scene) -> None:
    mine = scene.id_of(scene.make_capture("mine", scene.thief.object_name, ranks="0,1"))
    wait_until(lambda: mine in scene.daemon.captures)
    (request,) = (each for each in scene.daemon.starts if each.id == mine)
    assert request.job == scene.thief.exported_job
    assert dict(request.pods) == dict.fromkeys((0, 1), scene.thief.pods[0])


def test_times_that_are_none_stop_nothing_for_others(scene: Scene) -> None:
    """A time that the API server takes and Python does not: year 0."""
    server = scene.server
    never = "0000-01-01T00:00:00Z"
    run = {
        "apiVersion": "rankscope.dev/v1alpha1",
        "kind": "TrainingRun",
        "metadata": {"name": "gone", "labels": {"app.kubernetes.io/managed-by": "rankscope"}},
        "spec": {"workload": {"kind": "Job", "name": "gone"}},
    }
    scene.mallory.create(f"{BASE}/{OTHERS}/trainingruns", run)
    ended = {"type": "Ended", "status": "True", "reason": "x", "message": "", "lastTransitionTime": never}
    path = scene.make_capture("never", "none", ttlSecondsAfterFinished=10**6)
    scene.mallory.merge(f"{path}/status", {"status": {"phase": "Succeeded", "finishedAt": never}})
    scene.mallory.merge(f"{BASE}/{OTHERS}/trainingruns/gone/status", {"status": {"conditions": [ended]}})
    # What came after: another tenant's run is seen, and captured.
    late = ScriptedRun(server, TEAM, "late", [scene.daemon], job="10.0.0.5:29500")
    late.pods.append(late.make_pod(0))
    scene.daemon.ranks = [*scene.daemon.ranks, *(Spoken(late.pods[0], rank, 2, late.job) for rank in (0, 1))]
    wait_until(lambda: late.status.get("ranks", {}).get("seen") == 2)
    wanted = scene.id_of(late.make_capture("late", ranks="0"))
    wait_until(lambda: wanted in scene.daemon.captures)
