"""The names that the operator gives to the runs of pods, from the call to the exported series."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from rankscope.daemon.discovery.ranks import RankDiscovery
from rankscope.daemon.export.metrics import Exporter
from rankscope.daemon.loop import Daemon
from rankscope.daemon.sampler import Collectors
from rankscope.daemon.server.policies import MAX_NAMED_PODS, MAX_PODS, PolicyBoard
from rankscope.v1.policy_service_pb2 import ApplyPoliciesRequest, RunPolicy
from tests.unit.daemon import window_makers as make
from tests.unit.daemon.fake_proc import FakeProc, torchrun

POD, OTHER = "a" * 32, "b" * 32
RUN = "team/pytorchjob-llama"


class NamedNode:
    """A fake /proc, and what the operator has said of its pods."""

    def __init__(self, folder: Path) -> None:
        self.proc = FakeProc(folder / "proc")
        self.board = PolicyBoard(10.0)
        self.discovery = RankDiscovery(self.proc.root, "node-a", run_of_pod=self.board.run_of_pod)

    def add(self, pid: int, rank: int, pod: str = POD, **variables: str) -> None:
        self.proc.add(pid, torchrun(rank, **variables), cgroup=f"0::/kubepods/pod{pod}/c1\n", started=pid)

    def name(self, *pods: str, run: str = RUN, attempt: int = 0) -> list[str]:
        policy = RunPolicy(run=run, pods=pods, attempt=attempt)
        return self.board.apply(ApplyPoliciesRequest(policies=[policy], lease_seconds=60))

    def jobs(self) -> dict[int, str]:
        return {rank.pid: rank.job for rank in self.discovery.scan().ranks}


@pytest.fixture
def node(tmp_path: Path) -> NamedNode:
    return NamedNode(tmp_path)


@pytest.mark.parametrize("claimed", ["", "theirs/pytorchjob-llama", RUN])
def test_in_a_pod_the_operators_name_overrides_the_environment(node: NamedNode, claimed: str) -> None:
    node.add(50, 0, RANKSCOPE_RUN=claimed)
    assert "/" not in node.jobs()[50]
    node.name(POD)
    assert node.jobs() == {50: RUN}


def test_a_name_holds_for_later_processes_of_its_pod_only(node: NamedNode) -> None:
    node.name(POD)
    node.add(50, 0)
    node.add(51, 1, OTHER)
    node.proc.add(52, torchrun(2))
    jobs = node.jobs()
    assert jobs[50] == RUN
    assert all("/" not in job for pid, job in jobs.items() if pid != 50)


def test_pods_of_one_run_are_one_job(node: NamedNode) -> None:
    node.name(POD, OTHER)
    node.add(50, 0)
    node.add(51, 1, OTHER)
    assert node.jobs() == {50: RUN, 51: RUN}
    node.add(60, 0, OTHER)
    assert node.jobs() == {50: RUN, 51: RUN}
    node.proc.remove(50)
    assert node.jobs() == {51: RUN, 60: RUN}


def test_a_restart_keeps_the_name_and_parallel_launches_are_numbered(node: NamedNode) -> None:
    node.name(POD)
    node.add(50, 0)
    node.add(51, 0, MASTER_PORT="2", WORLD_SIZE="1")
    assert node.jobs() == {50: RUN, 51: f"{RUN}#2"}
    node.proc.remove(50)
    node.add(52, 0, MASTER_PORT="3")
    assert node.jobs() == {52: RUN, 51: f"{RUN}#2"}


def test_a_terminating_pod_keeps_its_withdrawn_name(node: NamedNode) -> None:
    node.name(POD)
    node.add(50, 0)
    assert node.jobs() == {50: RUN}
    node.name()
    assert node.jobs() == {50: RUN}
    assert node.board.run_of_pod(POD) is None
    node.name(POD, run="team/run-other")
    assert node.jobs() == {50: "team/run-other"}


def test_a_name_outlives_the_lease_of_the_rates() -> None:
    now = 0.0
    board = PolicyBoard(10.0, lambda: now)
    policy = RunPolicy(run=RUN, pods=[POD], attempt=2, stack_rate_hertz=1.0)
    board.apply(ApplyPoliciesRequest(policies=[policy], lease_seconds=60))
    now = 61.0
    assert board.held() == []
    named = board.run_of_pod(POD)
    assert named is not None and (named.name, named.attempt) == (RUN, 2)


@pytest.mark.parametrize("name", ["llama", "/llama", "team/", "te\nam/llama", "team/" + "x" * 500])
def test_what_is_no_name_of_a_run_is_refused(node: NamedNode, name: str) -> None:
    (note,) = node.name(POD, run=name)
    assert note.isprintable() and "NAMESPACE/RUN" in note
    assert node.board.run_of_pod(POD) is None


def test_the_latest_named_pods_are_kept_up_to_a_limit(node: NamedNode) -> None:
    for number in range(2 * MAX_NAMED_PODS // MAX_PODS):
        node.name(*(f"{number}-{pod}" for pod in range(2 * MAX_PODS)), run=f"team/run-{number}")
    assert len(node.board._runs) == MAX_NAMED_PODS
    assert node.board.run_of_pod("0-0") is None
    assert node.board.run_of_pod(f"{number}-0") is not None


def test_a_new_name_ends_the_old_names_series(node: NamedNode) -> None:
    plain = make.collectors(process=lambda _: make.process())
    daemon = Daemon(make.config(), collectors=Collectors(node.discovery, plain.registered), clock=make.FakeClock())
    registry = CollectorRegistry()
    registry.register(Exporter(daemon.snapshot))
    node.add(50, 0)
    daemon.tick(make.span())
    assert b"run7" in generate_latest(registry)
    node.name(POD, attempt=1)
    tick = daemon.tick(make.span(1))
    assert [(identity.job, identity.pid) for identity in tick.departed] == [("run7", 50)]
    assert [(each.identity.job, each.identity.attempt) for each in tick.windows.values()] == [(RUN, 1)]
    page = generate_latest(registry)
    assert b"run7" not in page and b"pytorchjob-llama" in page and b'attempt="1"' in page
    node.name(POD, attempt=2)
    tick = daemon.tick(make.span(2))
    assert not tick.departed, "another attempt is the same run"
    assert [each.identity.attempt for each in tick.windows.values()] == [2]
