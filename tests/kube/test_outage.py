"""An API server that goes away and forgets. The daemons are scripted; operator, API server and etcd are real."""

from __future__ import annotations

from tests.kube.api_server import ApiServer
from tests.kube.conftest import StartDaemon, StartOperator
from tests.kube.exported import culprits, messages_heard, verdicts
from tests.kube.scripted_run import ScriptedRun
from tests.support.waiting import wait_until


def test_verdicts_continue_through_an_outage_and_later_writes_are_current(
    namespace: str, start_daemon: StartDaemon, start_operator: StartOperator, stoppable_server: ApiServer
) -> None:
    server = stoppable_server
    run, gone, captured, flickering = runs = [
        ScriptedRun(server, namespace, name, [start_daemon(f"{namespace}-{name}")], ranks_per_pod=4)
        for name in ("llama", "gone", "captured", "flickering")
    ]
    for each in runs:
        each.start()
    operator = start_operator()
    for each in runs:
        each.wait_for_verdict("healthy")
    (daemon,) = captured.daemons
    capture = captured.make_capture("c", ranks="0,1")
    wait_until(lambda: daemon.captures)
    pid = operator.process.pid
    server.stop_api()
    wait_until(lambda: "rankscope_operator_shards_held 0.0" in operator.get("/metrics"))
    run.slow(1)  # when no lease can be held any more
    flickering.slow(3)

    def shown(each: ScriptedRun) -> set[str]:
        return verdicts(operator, each.exported_job)

    for each in (run, flickering):
        wait_until(lambda each=each: shown(each) == {"slow_rank"})
    flickering.slow()
    wait_until(lambda: shown(flickering) == {"healthy"})
    messages = messages_heard(operator)
    run.slow(2)
    wait_until(lambda: culprits(operator, run.exported_job) == {2})
    assert messages_heard(operator) > messages
    assert shown(captured) == {"healthy"}
    assert operator.get("/readyz") == operator.get("/healthz") == "ok\n"
    # Meanwhile a run is deleted where we cannot see it, and the history that would tell of it is wiped.
    server.delete_behind_the_watch(f"/registry/pods/{namespace}/{gone.pod_name(0)}")
    server.forget_history()
    server.start_api()
    run.wait_for_verdict("slow_rank", (2,))
    wait_until(lambda: gone.status.get("phase") == "Ended")
    assert run.status["phase"] == "Running"
    # What ran went on at the daemons, and was asked for once.
    assert captured.finished_capture(capture)["phase"] == "Succeeded"
    assert len(daemon.captures) == len(daemon.starts) == 1
    # What is over by now is not told: neither the alarm that came and went, nor the rank that was slow before.
    wait_until(lambda: "rankscope_operator_writes_waiting 0.0" in operator.get("/metrics"))
    events = server.admin.get(f"/api/v1/namespaces/{namespace}/events")["items"]
    told = [(event["involvedObject"]["name"], event["reason"]) for event in events]
    assert sorted(told) == sorted([(run.object_name, "SlowRank"), (run.pod_name(0), "SlowRank")])
    assert flickering.verdict() == ("healthy", "none", ())
    assert (operator.process.poll(), operator.process.pid) == (None, pid)
