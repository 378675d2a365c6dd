"""Operators that are killed, and what becomes of captures that were under way. The daemons are scripted, so that each
capture can be held at the point that matters; operators and the API server are real."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rankscope.operator.kube.leader_election import shard_of
from tests.kube.api_server import ApiServer
from tests.kube.conftest import StartDaemon, StartOperator
from tests.kube.exported import messages_heard, verdicts
from tests.kube.fleet import OPERATOR_NAMESPACE
from tests.kube.scripted_daemon import Spoken
from tests.kube.scripted_run import ScriptedRun
from tests.support.measuring import Measured
from tests.support.waiting import wait_until

TAKEOVER_SECONDS = 15.0
MAX_SECONDS = 120.0
# A look takes less, unless the machine stands still.
TICK_SECONDS = 0.5
SHARDS = 2


def scripted_run(server: ApiServer, namespace: str, start_daemon: StartDaemon, name: str) -> ScriptedRun:
    run = ScriptedRun(server, namespace, name, [start_daemon(f"{namespace}-{name}")], ranks_per_pod=4)
    run.start()
    run.slow(2)
    return run


def running_seconds_until(condition: Callable[[], bool]) -> float:
    """Without those in which the machine itself stood still, and all replicas with it."""
    seconds, last = 0.0, time.monotonic()
    while not condition():
        assert seconds < MAX_SECONDS
        time.sleep(0.1)
        now = time.monotonic()
        seconds, last = seconds + min(now - last, TICK_SECONDS), now
    return seconds


def holder(server: ApiServer, shard: int) -> str:
    path = f"/apis/coordination.k8s.io/v1/namespaces/{OPERATOR_NAMESPACE}/leases/rankscope-operator-shard-{shard}"
    if not server.admin.is_served(path):
        return ""
    return str(server.admin.get(path)["spec"].get("holderIdentity") or "")


def ended_well(run: ScriptedRun, path: str) -> dict[str, Any]:
    """One capture by the object's own id, with the straggler and a peer."""
    status = run.finished_capture(path)
    assert status["phase"] == "Succeeded", status
    uid = run.server.admin.get(path)["metadata"]["uid"]
    assert status["captureId"] == f"k-{uid}"
    (daemon,) = run.daemons
    ((name, ranks),) = daemon.captures.items()
    assert name == f"k-{uid}"
    assert 2 in ranks and len(ranks) == 2
    assert [rank["rank"] for rank in status["ranks"]] == ranks
    return status


def test_an_operator_killed_at_any_point_continues_the_same_capture(
    server: ApiServer, namespace: str, start_daemon: StartDaemon, start_operator: StartOperator
) -> None:
    names = ("unplanned", "asked", "recording", "written", "deleted")
    unplanned, asked, recording, written, deleted = runs = [
        scripted_run(server, namespace, start_daemon, name) for name in names
    ]
    operator = start_operator()
    for run in runs:
        run.wait_for_verdict("slow_rank", (2,))
    since = {run.name: run.status["verdict"]["since"] for run in runs}

    for run in (recording, written, deleted):
        run.daemons[0].release.clear()
    paths = {
        run.name: run.make_capture(run.name, deleteArtifacts=run is deleted) for run in (recording, written, deleted)
    }
    for run in (recording, written, deleted):
        wait_until(lambda run=run: run.capture(paths[run.name]).get("ranks", [{}])[0].get("state") == "running")
    deleted.daemons[0].answers.clear()  # it hears that the capture is to go, and the operator never learns
    server.admin.delete(paths["deleted"])
    asked.daemons[0].answers.clear()
    paths["asked"] = asked.make_capture("asked")
    wait_until(lambda: asked.daemons[0].starts)
    wait_until(lambda: deleted.daemons[0].cancelled)
    operator.kill()

    paths["unplanned"] = unplanned.make_capture("unplanned")
    written.daemons[0].release.set()  # over while nobody looked
    asked.daemons[0].answers.set()
    deleted.daemons[0].answers.set()
    start_operator()
    recording.daemons[0].release.set()
    for run in (unplanned, asked, recording, written):
        status = ended_well(run, paths[run.name])
        assert status["delivered"] == "2/2"
    wait_until(lambda: not server.admin.is_served(paths["deleted"]))
    assert deleted.daemons[0].captures == {}
    # The restart is no news: nothing is told twice, and what stood stands since the same moment.
    assert {run.name: run.status["verdict"]["since"] for run in runs} == since
    events = server.admin.get(f"/api/v1/namespaces/{namespace}/events")["items"]
    assert {event["type"] for event in events} == {"Warning"}
    told = [(e["involvedObject"]["kind"], e["involvedObject"]["name"], e["reason"]) for e in events]
    assert sorted(told) == sorted(
        [("TrainingRun", run.object_name, "SlowRank") for run in runs]
        + [("Pod", run.pod_name(0), "SlowRank") for run in runs]
    )


def test_the_second_replica_takes_over_in_time_without_repeating_captures(
    server: ApiServer, namespace: str, start_daemon: StartDaemon, start_operator: StartOperator, measured: Measured
) -> None:
    run = scripted_run(server, namespace, start_daemon, "llama")
    (daemon,) = run.daemons
    leader = start_operator("leader")
    run.wait_for_verdict("slow_rank", (2,))
    follower = start_operator("follower")
    daemon.release.clear()
    path = run.make_capture("c")
    wait_until(lambda: daemon.captures)
    wait_until(lambda: messages_heard(follower) > 5)
    wait_until(lambda: verdicts(leader, run.exported_job))
    assert not verdicts(follower, run.exported_job)  # which stands by
    leader.kill()
    takeover_seconds = running_seconds_until(lambda: holder(server, 0) == "follower")
    measured("takeover by the second replica", takeover_seconds, "s", at_most=TAKEOVER_SECONDS)
    daemon.release.set()
    ended_well(run, path)
    assert len(daemon.starts) == 1  # the follower asked what had become of it, and not for another


def test_a_dead_replicas_runs_and_captures_move_to_the_other(
    server: ApiServer, namespace: str, start_daemon: StartDaemon, start_operator: StartOperator, measured: Measured
) -> None:
    flags = ("--shards", str(SHARDS))
    replicas = {name: start_operator(name, *flags) for name in ("left", "right")}
    wait_until(lambda: {holder(server, shard) for shard in range(SHARDS)} == set(replicas))
    # Two runs of each shard, all on one node: its daemon is asked by both replicas, each about its own.
    daemon = start_daemon(f"{namespace}-all")
    names = (f"run-{number}" for number in range(1000))
    of_shard: dict[int, list[ScriptedRun]] = {shard: [] for shard in range(SHARDS)}
    while any(len(known) < 2 for known in of_shard.values()):
        run = ScriptedRun(server, namespace, next(names), [daemon], ranks_per_pod=4)
        known = of_shard[shard_of(f"{namespace}/{run.object_name}", SHARDS)]
        if len(known) < 2:
            known.append(run)
    runs = [run for known in of_shard.values() for run in known]
    late = of_shard[0][1]
    jobs = {run.name: [f"10.0.0.1:{29500 + number}"] for number, run in enumerate(runs)}
    jobs[late.name].append(f"{late.exported_job}#2")  # two jobs in one run, as in a Ray cluster
    for run in runs:
        run.pods.append(run.make_pod(0))
        spoken = [Spoken(run.pods[0], rank, 4, job) for job in jobs[run.name] for rank in range(4)]
        daemon.ranks = [*daemon.ranks, *spoken]
        run.slow(2)
    for run in runs:
        run.wait_for_verdict("slow_rank", (2,))
    for shard, known in of_shard.items():
        mine, other = (
            replicas[holder(server, shard)],
            next(r for n, r in replicas.items() if n != holder(server, shard)),
        )
        for run in known:
            wait_until(lambda run=run, mine=mine: verdicts(mine, run.exported_job))
            wait_until(lambda run=run, other=other: not verdicts(other, run.exported_job))

    # A capture under way in each shard, and one in the dying replica's that was only asked for.
    dying, surviving = holder(server, 0), holder(server, 1)
    daemon.release.clear()
    paths = {run.name: run.make_capture(run.name) for run in (of_shard[0][0], of_shard[1][0])}
    wait_until(lambda: len(daemon.captures) == 2)
    since = {run.name: run.status["verdict"]["since"] for run in runs}
    replicas[dying].kill()
    paths[late.name] = late.make_capture(late.name, jobNumber=2)
    takeover_seconds = running_seconds_until(lambda: {holder(server, shard) for shard in range(SHARDS)} == {surviving})
    measured("move of a shard", takeover_seconds, "s", at_most=TAKEOVER_SECONDS)
    wait_until(lambda: all(verdicts(replicas[surviving], run.exported_job) for run in runs))
    daemon.release.set()
    for run in (of_shard[0][0], of_shard[1][0], late):
        status = run.finished_capture(paths[run.name])
        assert (status["phase"], status["delivered"]) == ("Succeeded", "2/2"), status
    asked = [request.id for request in daemon.starts]
    assert len(asked) == len(set(asked)) == len(daemon.captures) == 3  # each once
    assert late.capture(paths[late.name])["job"] == daemon.starts[-1].job == jobs[late.name][1]
    # That a shard has moved is no news.
    assert {run.name: run.status["verdict"]["since"] for run in runs} == since
    events = server.admin.get(f"/api/v1/namespaces/{namespace}/events")["items"]
    assert len([event for event in events if event["reason"] == "SlowRank"]) == 2 * len(runs)
    for run in runs:
        run.slow(1)
    for run in runs:
        run.wait_for_verdict("slow_rank", (1,))
