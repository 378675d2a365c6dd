"""Runs that grow, lose a pod and end, and what people write on their pods. The daemons are scripted."""

from __future__ import annotations

from tests.kube.accounts import granted
from tests.kube.api_server import ApiServer
from tests.kube.conftest import QUICK, StartDaemon, StartOperator
from tests.kube.scripted_run import ScriptedRun
from tests.support.waiting import wait_until


def test_a_run_that_is_resized_preempted_and_deleted_is_followed(
    server: ApiServer, namespace: str, start_daemon: StartDaemon, start_operator: StartOperator
) -> None:
    daemons = [start_daemon(f"{namespace}-{letter}") for letter in "abc"]
    run = ScriptedRun(server, namespace, "llama", daemons)
    run.pods = [run.make_pod(0), run.make_pod(1)]
    run.speak()
    with granted(server, "node-conditions"):
        start_operator("operator-0", "--node-conditions", *QUICK)
        follow(server, run)


def follow(server: ApiServer, run: ScriptedRun) -> None:
    daemons = run.daemons
    for daemon in daemons:
        make_node(server, daemon.node)
    run.wait_for_verdict("healthy")
    uid = server.admin.get(run.path)["metadata"]["uid"]

    def seen() -> str:
        return str(run.status["ranks"]["summary"])

    wait_until(lambda: seen() == "4/4", seen)
    # Elastic: a pod joins, and every process restarts in a larger world.
    run.pods.append(run.make_pod(2))
    run.speak(incarnation=2)
    wait_until(lambda: seen() == "6/6" and run.verdict()[0] == "healthy")
    # Preempted: a pod goes, and comes back under another uid; its node's daemon had no time to say goodbye.
    daemons[1].ranks = []
    run.delete_pod(1)
    wait_until(lambda: seen() == "4/6")
    run.pods[1] = run.make_pod(1)
    run.speak(incarnation=3)
    wait_until(lambda: seen() == "6/6" and run.verdict()[0] == "healthy")
    run.slow(3)
    (culprit,) = run.wait_for_verdict("slow_rank", (3,))["verdict"]["culprits"]
    assert (culprit["pod"], culprit["node"]) == ("llama-worker-1", daemons[1].node)
    assert slow_node(server, daemons[1].node) is None  # the other rank there is as it should be
    run.slow(2, 3)
    run.wait_for_verdict("slow_rank", (2, 3))
    wait_until(lambda: slow_node(server, daemons[1].node) == "True")
    assert [slow_node(server, daemon.node) for daemon in daemons] == [None, "True", None]
    # Smaller again.
    run.pods = run.pods[:1]
    for index in (1, 2):
        run.delete_pod(index)
        daemons[index].ranks = []
    run.speak(incarnation=4)
    wait_until(lambda: seen() == "2/2")
    wait_until(lambda: slow_node(server, daemons[1].node) == "False")
    daemons[0].ranks = []
    run.delete_pod(0)
    wait_until(lambda: run.status["phase"] == "Ended")
    assert server.admin.get(run.path)["metadata"]["uid"] == uid  # one run from beginning to end
    # Recreated under the same name, it is another run.
    again = ScriptedRun(server, run.namespace, "llama", daemons[:1])
    again.start()
    wait_until(lambda: again.status.get("phase") == "Running")
    assert server.admin.get(run.path)["metadata"]["uid"] != uid


def make_node(server: ApiServer, name: str) -> None:
    server.admin.create("/api/v1/nodes", {"metadata": {"name": name}})
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "of the kubelet"}
    server.admin.merge(f"/api/v1/nodes/{name}/status", {"status": {"conditions": [ready]}})


def slow_node(server: ApiServer, name: str) -> str | None:
    conditions = {c["type"]: c["status"] for c in server.admin.get(f"/api/v1/nodes/{name}")["status"]["conditions"]}
    assert conditions["Ready"] == "True"  # others' conditions stay
    return conditions.get("RankscopeSlowNode")


def test_a_malformed_annotation_is_reported_once_on_its_pod(
    server: ApiServer, namespace: str, start_daemon: StartDaemon, start_operator: StartOperator
) -> None:
    daemon = start_daemon(f"{namespace}-a")
    run = ScriptedRun(server, namespace, "llama", [daemon], ranks_per_pod=4)
    wrong = {"rankscope.dev/mfu-target": "a lot", "rankscope.dev/watch": "maybe"}
    run.pods.append(run.make_pod(0, annotations=wrong))
    run.speak()
    operator = start_operator()
    run.wait_for_verdict("healthy")

    def told() -> list[tuple[str, str]]:
        events = server.admin.get(f"/api/v1/namespaces/{namespace}/events")["items"]
        return [(event["involvedObject"]["name"], event["message"].partition(":")[0]) for event in events]

    expected = [(run.pod_name(0), "rankscope.dev/mfu-target"), (run.pod_name(0), "rankscope.dev/watch")]
    wait_until(lambda: sorted(told()) == expected)
    operator.kill()
    start_operator()
    run.slow(1)
    run.wait_for_verdict("slow_rank", (1,))
    assert sorted(one for one in told() if one in expected) == expected  # said before the restart, and not again
