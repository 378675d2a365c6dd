from __future__ import annotations

from typing import Any

import pytest

from rankscope.operator.kube.binding import SILENT_SECONDS, Binding
from rankscope.operator.kube.inventory import Inventory
from rankscope.operator.kube.pods import Owner, Pod
from rankscope.v1.rank_service_pb2 import WatchRanksResponse


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def pod(number: int, node: str, **fields: Any) -> Pod:
    labels = {"training.kubeflow.org/job-name": "llama"}
    known = {"uid": f"pod-{number}", "name": f"llama-worker-{number}", "namespace": "team", "labels": labels}
    return Pod(**{**known, "node": node, "phase": "Running", **fields})


@pytest.fixture
def inventory() -> Inventory:
    made = Inventory()
    made.changed("pod-0", pod(0, "node-a"))
    made.changed("pod-1", pod(1, "node-b"))
    return made


def message(*ranks: int, pod: str = "pod-0", job: str = "10.0.0.1:29500/none", node: str = "lie") -> WatchRanksResponse:
    said = WatchRanksResponse(node=node)
    for rank in ranks:
        identity = said.windows.add().identity
        identity.job, identity.rank, identity.world_size, identity.node, identity.pod = job, rank, 8, node, pod
    return said


def test_windows_get_the_names_that_the_api_server_knows(inventory: Inventory) -> None:
    bound = Binding(inventory, Clock()).bind(message(0, 1), "node-a")
    assert [(w.identity.job, w.identity.node, w.identity.namespace) for w in bound.windows] == [
        ("team/pytorchjob-llama", "node-a", "team")
    ] * 2
    assert bound.windows[0].identity.pod_name == "llama-worker-0"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (message(0, pod="pod-1"), "other_node"),
        (message(0, pod="pod-9"), "unknown_pod"),
        (message(0, pod=""), "unknown_pod"),
        (message(99), "rank"),
    ],
)
def test_a_daemon_does_not_speak_for_others(inventory: Inventory, said: WatchRanksResponse, reason: str) -> None:
    binding = Binding(inventory, Clock())
    assert not binding.bind(said, "node-a").windows
    assert binding.refusals.counts[reason] == 1


def test_a_daemon_that_sends_ten_times_too_much_is_cut_to_its_pace_and_others_are_not(inventory: Inventory) -> None:
    clock = Clock()
    binding = Binding(inventory, clock)
    kept = 0
    for _ in range(1000):
        clock.now += 0.02  # 50 messages a second
        kept += len(binding.bind(message(0), "node-a").windows)
        if round(clock.now * 50) % 100 == 0:
            assert binding.bind(message(1, pod="pod-1"), "node-b").windows
    assert 60 <= kept <= 150  # of 1000, in 20 s
    assert binding.refusals.counts["rate"] == 1000 - kept


def test_a_restarted_job_with_another_port_keeps_the_runs_name_and_a_second_job_gets_its_own(
    inventory: Inventory,
) -> None:
    clock = Clock()
    binding = Binding(inventory, clock)
    first = binding.bind(message(0, job="a:1/x"), "node-a").windows[0].identity.job
    beside = binding.bind(message(0, job="a:2/x"), "node-a").windows[0].identity.job
    assert (first, beside) == ("team/pytorchjob-llama", "team/pytorchjob-llama#2")
    clock.now += SILENT_SECONDS + 1
    assert binding.bind(message(0, job="a:3/x"), "node-a").windows[0].identity.job == first


def test_a_pod_that_merely_has_an_owner_is_a_run_once_ranks_are_seen_in_it() -> None:
    inventory = Inventory()
    owner = Owner("apps/v1", "StatefulSet", "trainer", "o")
    inventory.changed("pod-0", pod(0, "node-a", labels={}, owner=owner))
    assert not inventory.runs()
    Binding(inventory, Clock()).bind(message(0), "node-a")
    assert [key.object_name for key in inventory.runs()] == ["statefulset-trainer"]


def test_a_run_goes_with_its_last_pod_and_a_pod_that_changes_its_label_moves(inventory: Inventory) -> None:
    inventory.changed("pod-1", pod(1, "node-b", labels={"rankscope.dev/run": "mine"}))
    assert sorted(key.object_name for key in inventory.runs()) == ["pytorchjob-llama", "run-mine"]
    inventory.deleted("pod-0")
    inventory.deleted("pod-0")
    assert [key.object_name for key in inventory.runs()] == ["run-mine"]
