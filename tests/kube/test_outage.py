"""An API server that goes away and forgets. The daemons are scripted; operator, API server and etcd are real."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.kube.accounts import OPERATOR
from tests.kube.api_server import ApiServer
from tests.kube.operator_process import OperatorProcess
from tests.kube.scripted_daemon import ScriptedDaemon
from tests.kube.scripted_run import ScriptedRun

# Longer than any lease lives, so that nobody holds one when the server is back; a longer outage is no different.
OUTAGE_SECONDS = 20.0


@pytest.mark.timeout(600)
def test_an_outage_with_lost_history_stops_no_verdict_and_what_is_written_afterwards_is_the_present(
    own_server: ApiServer, tmp_path: Path
) -> None:
    server, namespace = own_server, "outage"
    server.admin.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
    daemons = [ScriptedDaemon(server, "node-a"), ScriptedDaemon(server, "node-b")]
    for daemon in daemons:
        daemon.start()
    run = ScriptedRun(server, namespace, "llama", [daemons[0]], ranks_per_pod=4)
    gone = ScriptedRun(server, namespace, "gone", [daemons[1]], ranks_per_pod=2)
    run.start()
    gone.start()
    operator = OperatorProcess(server.user(OPERATOR), tmp_path)
    operator.start()
    try:
        run.wait_for_verdict("healthy")
        gone.wait_for_verdict("healthy")
        server.stop_api()
        stopped_at = time.monotonic()
        server.wait_for(lambda: "rankscope_operator_shards_held 0.0" in operator.get("/metrics"))
        run.slow(1)  # when no lease can be held any more

        def exported() -> set[str]:
            """Verdicts of the run in /metrics, with severity."""
            lines = re.findall(r"^rankscope_job_verdict\{(.*)\} 1", operator.get("/metrics"), re.MULTILINE)
            ours = [line for line in lines if f'job="{namespace}/pytorchjob-llama"' in line]
            return {match[1] for line in ours if (match := re.search(r'[{,]?verdict="(\w+)"', line))}

        server.wait_for(lambda: exported() == {"slow_rank"})
        server.wait_for(lambda: time.monotonic() - stopped_at > OUTAGE_SECONDS)
        assert exported() == {"slow_rank"}
        assert operator.get("/readyz") == "ok\n"
        # Meanwhile a run is deleted where we cannot see it, and the history that would tell of it is wiped.
        server.delete_behind_the_watch(f"/registry/pods/{namespace}/{gone.pod_name(0)}")
        server.forget_history()
        server.start_api()
        run.wait_for_verdict("slow_rank", (1,))
        server.wait_for(lambda: gone.status.get("phase") == "Ended")
        assert run.status["phase"] == "Running"
        assert operator.process.poll() is None
    finally:
        operator.stop()
        for daemon in daemons:
            daemon.stop()
