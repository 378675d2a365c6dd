"""Daemons that lie, and neighbours that must not notice. The daemons are scripted; operator and API server are real."""

from __future__ import annotations

import os
import re

from tests.kube.api_server import ApiServer
from tests.kube.conftest import QUICK, StartDaemon, StartOperator
from tests.kube.exported import verdicts
from tests.kube.operator_process import OperatorProcess
from tests.kube.scripted_daemon import GarbageDaemon, Spoken
from tests.kube.scripted_run import ScriptedRun
from tests.support.waiting import wait_until


def refused(operator: OperatorProcess) -> dict[str, float]:
    pattern = r'^rankscope_operator_windows_refused_total\{reason="(\w+)"\} (\S+)'
    found = re.findall(pattern, operator.get("/metrics"), re.MULTILINE)
    return {reason: float(number) for reason, number in found}


def test_a_lying_daemon_does_not_change_its_neighbours_verdict(
    server: ApiServer, namespace: str, start_daemon: StartDaemon, start_operator: StartOperator
) -> None:
    honest, liar = start_daemon(f"{namespace}-honest"), start_daemon(f"{namespace}-liar")
    garbage = GarbageDaemon(server, f"{namespace}-garbage", lambda: os.urandom(2000))
    garbage.start()
    try:
        run = ScriptedRun(server, namespace, "llama", [honest, liar])
        run.start()
        other = ScriptedRun(server, namespace, "other", [honest], ranks_per_pod=4)
        other.pods.append(other.make_pod(0))
        other.job = "other"
        others = [Spoken(other.pods[0], rank, 4, other.job) for rank in range(4)]
        honest.ranks = [*honest.ranks, *others]
        other.slow(3)  # which is to be seen as long as the liar is heard: a job that seems to restart has no findings
        operator = start_operator("operator-0", *QUICK)
        run.wait_for_verdict("healthy")
        other.wait_for_verdict("slow_rank", (3,))

        true_words = list(liar.ranks)
        pod = run.pods[1]
        lies = {
            # Of pods on another node, under its name; and of pods that do not exist.
            "other_node": [
                Spoken(each.pods[0], rank, 4, each.job, self_seconds=0.001) for each in (run, other) for rank in (0, 1)
            ],
            "unknown_pod": [Spoken("11111111-2222-3333-4444-555555555555", 0, 4)],
            # Of ranks that its neighbour has, as another process each time; and of ranks that cannot be.
            "rank_taken": [Spoken(pod, rank, 4, self_seconds=0.001, incarnation=99) for rank in (0, 1)],
            "rank": [Spoken(pod, 7, 4), Spoken(pod, -1, 4)],
            # Of more jobs than a run can have.
            "jobs": [Spoken(pod, 0, 1, f"{run.exported_job}#{number}") for number in range(100, 140)],
        }
        liar.says_node = honest.node
        liar.ranks = [*true_words, *(lie for kind in lies.values() for lie in kind)]
        wait_until(lambda: set(lies) <= refused(operator).keys() and "rank_taken" in refused(operator))
        for windows_per_second, reason in ((1, "other_node"), (10, "rate")):
            liar.windows_per_second = windows_per_second
            told = refused(operator).get(reason, 0.0)
            wait_until(lambda told=told, reason=reason: refused(operator).get(reason, 0.0) > told + 20)
            assert verdicts(operator, other.exported_job) == {"slow_rank"}
            assert other.verdict() == ("slow_rank", "alarm", (3,))
            assert other.status["ranks"]["summary"] == "4/4"
        # Its own run may suffer; what it makes the operator hold is bounded.
        assert operator.get("/metrics").count("\nrankscope_job_verdict{") < 40
        liar.windows_per_second, liar.ranks = 1, true_words
        wait_until(lambda: run.status["ranks"]["summary"] == "4/4" and run.verdict()[0] == "healthy")
        assert operator.process.poll() is None
        # Garbage is told of when the stream is given up, not with every message; gRPC itself does so as well.
        failures = [line for line in operator.log.splitlines() if "Traceback" in line and "grpc._common" not in line]
        assert not failures
        assert "it sent what is no message" in operator.log
        assert operator.log.count(garbage.node) < 60
    finally:
        garbage.stop()


def test_a_lost_daemon_is_missed_and_counts_again_on_return(
    server: ApiServer, namespace: str, start_daemon: StartDaemon, start_operator: StartOperator
) -> None:
    run = ScriptedRun(server, namespace, "llama", [start_daemon(f"{namespace}-a"), start_daemon(f"{namespace}-b")])
    run.start()
    start_operator("operator-0", *QUICK)
    run.wait_for_verdict("healthy")
    run.daemons[1].silence()

    def seen() -> str:
        (condition,) = [c for c in run.status["conditions"] if c["type"] == "RanksSeen"]
        return f"{run.status['ranks']['summary']} {condition['status']} {run.verdict()[0]}"

    wait_until(lambda: seen() == "2/4 False insufficient_data")
    path = run.make_capture("c", ranks="0,2", patienceSeconds=5)
    wait_until(lambda: run.daemons[0].captures)
    run.daemons[1].serve()
    wait_until(lambda: seen() == "4/4 True healthy")
    # The rank whose daemon was away may or may not have been asked in time; either way the status is true.
    status = run.finished_capture(path)
    delivered = {rank["rank"] for rank in status["ranks"] if rank["state"] == "analysed"}
    told = {rank["rank"]: rank.get("error", "") for rank in status["ranks"] if rank["state"] == "failed"}
    assert 0 in delivered and delivered | told.keys() == {0, 2}
    assert status["phase"] == ("Succeeded" if not told else "Failed")
    assert all("away" in error for error in told.values())
