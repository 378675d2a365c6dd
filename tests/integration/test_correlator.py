"""Two machines and a correlator on a third, without Kubernetes: real daemons, a real job across them, mutual TLS."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rankscope.analysis.profiles.pprof import read_pprof
from tests.integration.daemon_process import MAIN, PATIENCE_SECONDS
from tests.integration.machines import Machine, machines
from tests.integration.small_job import SCRIPT
from tests.support.waiting import wait_until

SLOW_RANK = 3
API = "10.77.0.100:9468"
FETCH = "import sys, urllib.request; sys.stdout.write(urllib.request.urlopen(sys.argv[1], timeout=20).read().decode())"


@dataclass
class Fleet:
    folder: Path
    head: Machine
    nodes: list[Machine]
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def nodes_file(self) -> Path:
        return self.folder / "nodes"

    def certificates(self, *words: str) -> str:
        done = subprocess.run([*MAIN, "certificates", *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def tls(self, name: str) -> tuple[str, str, str]:
        held = self.folder / "pki" / name
        return str(held / "tls.crt"), str(held / "tls.key"), str(held / "ca.crt")

    def start_daemon(self, node: Machine) -> None:
        certificate, key, authority = self.tls(f"daemon-{node.name}")
        own = self.folder / node.name
        words = [*MAIN, "daemon", "--grpc-listen", f"{node.address}:9465", "--metrics-listen", "127.0.0.1:9464"]
        words += ["--tls-certificate", certificate, "--tls-key", key, "--tls-client-authority", authority]
        words += ["--socket", str(own / "s" / "d.sock"), "--capture-dir", str(own / "captures")]
        words += ["--profile-dir", str(own / "profiles")]
        self.running[node.name] = node.start([*words, "--window-seconds", "0.5"], self.folder / f"{node.name}.log")

    def start_correlator(self) -> None:
        certificate, key, authority = self.tls("correlator-head")
        words = [*MAIN, "correlator", "--daemons-file", str(self.nodes_file), "--api-listen", API]
        words += ["--tls-certificate", certificate, "--tls-key", key, "--tls-authority", authority]
        words += ["--state-dir", str(self.folder / "state"), "--audit-log", str(self.folder / "audit")]
        self.running["head"] = self.head.start(words, self.folder / "head.log")

    def start_job(self) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "MASTER_", "KINETO"))}
        for rank in range(4):
            node = self.nodes[rank // 2]
            variables = {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"}
            variables |= {"MASTER_ADDR": self.nodes[0].address, "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0"}
            variables |= {"RANKSCOPE_RUN": "llama-7", "RANKSCOPE_PROBE": "1", "JOB_FOLDER": str(self.folder)}
            command = ["env", "-i", *(f"{k}={v}" for k, v in {**kept, **variables}.items()), f"SLOW_RANK={SLOW_RANK}"]
            self.running[f"rank {rank}"] = node.start(
                [*command, sys.executable, str(SCRIPT)], self.folder / f"rank{rank}.log"
            )

    def stop(self, name: str) -> None:
        """nsenter passes no signals on: the service itself is told."""
        process = self.running.pop(name)
        inner = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(inner[0]), signal.SIGTERM)
        process.wait(PATIENCE_SECONDS)

    def metrics(self, machine: Machine, port: int) -> list[tuple[str, Mapping[str, str], float]]:
        done = machine.run(sys.executable, "-c", FETCH, f"http://127.0.0.1:{port}/metrics")
        families = text_string_to_metric_families(done.stdout)
        return [(sample.name, sample.labels, sample.value) for family in families for sample in family.samples]

    def value(self, name: str) -> float | None:
        return next((value for found, _, value in self.metrics(self.head, 9466) if found == name), None)

    def culprits(self) -> dict[tuple[str, str], str]:
        """Rank and node of those that the correlator names, and the run."""
        found = self.metrics(self.head, 9466)
        named = [labels for name, labels, _ in found if name == "rankscope_job_culprit"]
        return {(one["rank"], one["node"]): one.get("run") or one["job"] for one in named}

    def wait_for_the_slow_rank(self) -> str:
        """The run's name."""
        wait_until(lambda: set(self.culprits()) == {(str(SLOW_RANK), "node-b")}, self.explain, 2 * PATIENCE_SECONDS)
        return self.culprits()[str(SLOW_RANK), "node-b"]

    def ask(self, *words: str, who: str = "client-alice") -> subprocess.CompletedProcess[str]:
        certificate, key, authority = self.tls(who)
        shown = ["--connect", API, "--certificate-authority", authority]
        shown += ["--client-certificate", certificate, "--client-key", key]
        return self.head.run(*MAIN, *words, *shown, seconds=240)

    def explain(self) -> str:
        logs = [f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in self.folder.glob("*.log")]
        metrics = [
            each for each in self.metrics(self.head, 9466) if each[0].startswith(("rankscope_job", "rankscope_op"))
        ]
        return "\n".join([*logs, *map(str, metrics)])


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    with ExitStack() as stack:
        head, *nodes = stack.enter_context(machines("head", "node-a", "node-b"))
        fleet = Fleet(folder, head, nodes)
        pki = str(folder / "pki")
        fleet.certificates("init", pki)
        for node in nodes:
            fleet.certificates("issue", pki, "--role", "daemon", node.name, "--address", node.address)
        fleet.certificates("issue", pki, "--role", "correlator", "head", "--address", head.address)
        fleet.certificates("issue", pki, "--role", "client", "alice")
        fleet.nodes_file.write_text("# one node at first\n10.77.0.1\n")
        for node in nodes:
            fleet.start_daemon(node)
        fleet.start_job()
        fleet.start_correlator()
        # The others are started before the first one answers: all of them need seconds.
        wait_until(lambda: (folder / "READY").exists(), fleet.explain, 5 * PATIENCE_SECONDS)
        yield fleet


@pytest.mark.acceptance
@pytest.mark.timeout(1800)
def test_a_slow_rank_is_named_captured_and_found_after_restarts(fleet: Fleet, tmp_path: Path) -> None:
    wait_until(lambda: fleet.value("rankscope_operator_daemons_connected") == 1, fleet.explain)
    fleet.nodes_file.write_text("10.77.0.1\n10.77.0.2:9465\n")
    run = fleet.wait_for_the_slow_rank()
    assert run == "llama-7"
    shown = fleet.ask("top", "--once", "--json")
    assert shown.returncode == 0, shown.stderr
    assert f'"{run}"' in shown.stdout
    assert "node-b" in shown.stdout

    # The slow rank with a peer, for a user who is known by a certificate.
    done = fleet.ask(
        *(
            "capture",
            "--run",
            run,
            "--ranks",
            "straggler+peer",
            "--steps",
            "3",
            "--json",
            "--reason",
            "slow since noon",
        ),
        *("--output", str(tmp_path / "traces")),
    )
    assert done.returncode == 0, done.stderr + fleet.explain()
    capture = json.loads(done.stdout)
    ranks = {entry["rank"]: entry for entry in capture["ranks"]}
    assert len(ranks) == 2
    assert ranks[SLOW_RANK]["node"] == "node-b"
    assert {entry["state"] for entry in ranks.values()} == {"analysed"}
    assert len(list((tmp_path / "traces").glob("*"))) >= 2

    # The stacks of now and the profile of all ranks, from both machines.
    def stacks() -> dict[str, Any]:
        dumped = fleet.ask("stacks", "--run", run, "--json")
        assert dumped.returncode == 0, dumped.stderr
        found: dict[str, Any] = json.loads(dumped.stdout)
        return found

    # A busy machine may be too late with one of them.
    wait_until(lambda: not stacks()["problems"], fleet.explain)
    assert stacks()["nodes"] == {"0": "node-a", "1": "node-a", "2": "node-b", "3": "node-b"}

    def profiled() -> set[int]:
        file = tmp_path / "profile.pb.gz"
        done = fleet.ask("flame", "--run", run, "-o", str(file))
        return {one.rank for one in read_pprof(file.read_bytes())} if done.returncode == 0 else set()

    wait_until(lambda: profiled() == {0, 1, 2, 3}, fleet.explain)

    # A node's certificate is good for none of this.
    for words in (("captures", "ls"), ("stacks", "--run", run), ("flame", "--run", run)):
        assert fleet.ask(*words, who="daemon-node-a").returncode != 0

    # The last figures of a daemon that is away are marked as old. When it is back, it is followed again.
    fleet.stop("node-b")
    wait_until(lambda: fleet.value("rankscope_operator_daemons_connected") == 1, fleet.explain)
    wait_until(lambda: "nothing from node node-b for" in fleet.ask("top", "--once").stdout, fleet.explain)
    fleet.start_daemon(fleet.nodes[1])
    wait_until(lambda: fleet.value("rankscope_operator_daemons_connected") == 2, fleet.explain)

    # A restarted correlator has the verdict again, and still knows the capture.
    fleet.stop("head")
    fleet.start_correlator()
    assert fleet.wait_for_the_slow_rank() == run
    listed: dict[str, Any] = json.loads(fleet.ask("captures", "ls", "--json").stdout)
    assert [(one["id"], one["state"]) for one in listed["captures"]] == [(capture["id"], "analysed")]
    again = fleet.ask("captures", "get", capture["id"], "--output", str(tmp_path / "again"))
    assert again.returncode == 0, again.stderr
    assert len(list((tmp_path / "again").glob("*"))) >= 2

    # Who asked for it is on record, once.
    records = [json.loads(line) for line in (fleet.folder / "audit").read_text().splitlines()]
    asked = [one for one in records if one["event"] == "asked" and "what" not in one]
    assert [(one["user"], one["verified"], one["reason"]) for one in asked] == [("alice", True, "slow since noon")]
    ended = [(one.get("what"), one["result"]) for one in records if one["event"] == "ended"]
    assert ended.count((None, "Succeeded")) == 1 and set(ended) == {(None, "Succeeded"), ("stacks", "Succeeded")}
    assert {(one["user"], one["what"], one["event"]) for one in records if "what" in one} == {
        ("alice", "stacks", "asked"),
        ("alice", "stacks", "ended"),
        ("alice", "profile", "downloaded"),
    }
