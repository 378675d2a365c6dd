from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rankscope.operator.runs.inventory import Inventory
from rankscope.operator.runs.pods import TEAM, USER, Owner, Pod
from rankscope.operator.runs.rank_binding import (
    MAX_WINDOW_BYTES,
    OWNED_SECONDS,
    RANKS_PER_NODE,
    Accepted,
    Binding,
)
from rankscope.v1.identity_pb2 import Program
from rankscope.v1.rank_service_pb2 import WatchRanksResponse
from tests.daemon_messages import sent


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


RUN = "team/pytorchjob-llama"


def message(*ranks: int, pod: str = "pod-0", job: str = RUN, node: str = "lie") -> WatchRanksResponse:
    said = WatchRanksResponse(node=node)
    for rank in ranks:
        identity = said.windows.add().identity
        identity.job, identity.rank, identity.world_size, identity.node, identity.pod = job, rank, 8, node, pod
    return said


def bind(
    binding: Binding, message: WatchRanksResponse, node: str, keeps: Callable[[str], bool] = lambda name: True
) -> Accepted:
    return binding.bind([sent(message, node)], keeps)


def test_windows_get_the_names_that_the_api_server_knows(inventory: Inventory) -> None:
    bound = bind(Binding(inventory, Clock()), message(0, 1), "node-a")
    assert [(w.identity.job, w.identity.node, w.identity.namespace) for w in bound.windows] == [
        ("team/pytorchjob-llama", "node-a", "team")
    ] * 2
    assert bound.windows[0].identity.pod_name == "llama-worker-0"


def test_team_user_and_image_are_those_of_the_pod(inventory: Inventory) -> None:
    labels = {"training.kubeflow.org/job-name": "llama", TEAM: "vision", USER: "ann"}
    inventory.changed("pod-1", pod(1, "node-b", labels=labels, image="registry/train:7"))
    lies = [message(0), message(1, pod="pod-1")]
    for said in lies:
        said.windows[0].identity.program.MergeFrom(Program(command="python t.py", user="x", team="x", image="x"))
    binding = Binding(inventory, Clock())
    bound = [bind(binding, said, node).windows[0] for said, node in zip(lies, ("node-a", "node-b"), strict=True)]
    assert bound[0].identity.program == Program(command="python t.py", team="team")
    expected = Program(command="python t.py", team="vision", user="ann", image="registry/train:7")
    assert bound[1].identity.program == expected


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (message(0, pod="pod-1"), "other_node"),
        (message(0, pod="pod-9"), "unknown_pod"),
        (message(0, pod=""), "unknown_pod"),
        (message(99), "rank"),
    ],
)
def test_a_daemon_does_not_report_for_others(inventory: Inventory, said: WatchRanksResponse, reason: str) -> None:
    binding = Binding(inventory, Clock())
    assert not bind(binding, said, "node-a").windows
    assert binding.refusals.counts[reason] == 1


def test_a_daemon_that_floods_is_throttled_without_affecting_others(inventory: Inventory) -> None:
    clock = Clock()
    binding = Binding(inventory, clock)
    kept = 0
    for _ in range(1000):
        clock.now += 0.02  # 50 messages a second
        kept += len(bind(binding, message(0), "node-a").windows)
        if round(clock.now * 50) % 100 == 0:
            assert bind(binding, message(1, pod="pod-1"), "node-b").windows
    assert 60 <= kept <= 150  # of 1000, in 20 s
    assert binding.refusals.counts["rate"] == 1000 - kept


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        (RUN, RUN),
        (f"{RUN}#2", f"{RUN}#2"),  # a launch beside another in the run's pods
        ("10.0.0.1:29500", RUN),  # a daemon that does not know the run's name yet
        ("theirs/pytorchjob-llama", RUN),
        ("theirs/pytorchjob-llama#2", RUN),
    ],
)
def test_a_ranks_pod_decides_its_run_whatever_the_daemon_says(inventory: Inventory, reported: str, name: str) -> None:
    (window,) = bind(Binding(inventory, Clock()), message(0, job=reported), "node-a").windows
    assert window.identity.job == name


@pytest.mark.parametrize("number", ["", "0", "1", "02", "17", "9" * 5000, "-2", "x", "²"])
def test_an_impossible_job_number_is_refused(inventory: Inventory, number: str) -> None:
    binding = Binding(inventory, Clock())
    assert not bind(binding, message(0, job=f"{RUN}#{number}"), "node-a").windows
    assert binding.refusals.counts == {"jobs": 1}


def test_a_rank_renamed_on_its_node_has_not_ended(inventory: Inventory) -> None:
    binding = Binding(inventory, Clock())
    before = message(0, 1, job="10.0.0.1:29500")
    bind(binding, before, "node-a")
    after = message(0)
    after.departed.extend(window.identity for window in before.windows)
    accepted = bind(binding, after, "node-a")
    assert [window.identity.rank for window in accepted.windows] == [0]
    assert [(identity.rank, identity.job) for identity in accepted.departed] == [(1, RUN)]


def test_an_owned_pod_is_a_run_once_ranks_are_seen() -> None:
    inventory = Inventory()
    owner = Owner("apps/v1", "StatefulSet", "trainer", "o")
    inventory.changed("pod-0", pod(0, "node-a", labels={}, owner=owner))
    assert not inventory.runs()
    bind(Binding(inventory, Clock()), message(0), "node-a")
    assert [key.object_name for key in inventory.runs()] == ["statefulset-trainer"]


def test_runs_end_with_their_last_pod_and_relabelled_pods_move(inventory: Inventory) -> None:
    inventory.changed("pod-1", pod(1, "node-b", labels={"rankscope.dev/run": "mine"}))
    assert sorted(key.object_name for key in inventory.runs()) == ["pytorchjob-llama", "run-mine"]
    inventory.deleted("pod-0")
    inventory.deleted("pod-0")
    assert [key.object_name for key in inventory.runs()] == ["run-mine"]


def test_runs_of_other_shards_are_dropped_after_one_check(inventory: Inventory) -> None:
    inventory.changed("pod-2", pod(2, "node-a", labels={"rankscope.dev/run": "mine"}))
    said = message(0, 1)
    said.MergeFrom(message(0, pod="pod-2", job="b:1/x"))
    said.departed.add().CopyFrom(said.windows[0].identity)
    asked: list[str] = []

    def keeps(name: str) -> bool:
        asked.append(name)
        return name == "team/run-mine"

    binding = Binding(inventory, Clock())
    accepted = bind(binding, said, "node-a", keeps)
    assert [window.identity.job for window in accepted.windows] == ["team/run-mine"]
    assert not accepted.departed
    assert sorted(asked) == ["team/pytorchjob-llama", "team/run-mine"]
    assert sum(binding.refusals.counts.values()) == 0


def test_kept_windows_do_not_retain_a_partly_refused_message(inventory: Inventory) -> None:
    said = message(0, pod="pod-9")
    said.windows[0].problems.append("x" * 1_000_000)
    said.MergeFrom(message(0))
    (kept,) = bind(Binding(inventory, Clock()), said, "node-a").windows
    assert len(kept.message_bytes) < 200


def test_an_oversized_or_garbage_window_alone_is_refused(inventory: Inventory) -> None:
    said = message(0, 1, 2)
    said.windows[0].problems.append("x" * MAX_WINDOW_BYTES)
    read = sent(said, "node-a")
    read.ranks = [*read.ranks[:2], b"\xff\xff"]
    binding = Binding(inventory, Clock())
    accepted = binding.bind([read])
    assert [window.identity.rank for window in accepted.windows] == [1]
    assert binding.refusals.counts == {"size": 1, "unreadable": 1}


def test_ranks_keep_the_daemons_names_without_an_api_server() -> None:
    binding = Binding(monotonic=Clock())
    said = message(0, 99, pod="", job="llama-77", node="laptop")
    (kept,) = bind(binding, said, "laptop").windows
    assert (kept.identity.job, kept.identity.node) == ("llama-77", "laptop")
    assert binding.refusals.counts == {"rank": 1}
    gone = WatchRanksResponse(departed=[said.windows[0].identity])
    assert [identity.rank for identity in bind(binding, gone, "laptop").departed] == [0]


def test_invented_processes_are_forgotten_and_their_number_is_bounded(inventory: Inventory) -> None:
    clock = Clock()
    binding = Binding(inventory, clock)
    for number in range(3 * RANKS_PER_NODE):
        clock.now += 1.0
        said = message(0)
        said.windows[0].identity.pid = number
        said.windows[0].identity.rank, said.windows[0].identity.world_size = number, 1 << 30
        bind(binding, said, "node-a")
    assert len(binding._senders["node-a"].known) <= RANKS_PER_NODE
    (owners,) = binding._owners.values()
    assert len(owners[RUN]) < 100
    clock.now += 0.1
    flood = message(*range(1 << 11))
    for number, window in enumerate(flood.windows):
        window.identity.world_size, window.identity.pid = 1 << 12, number
    clock.now += 1000.0
    kept = bind(binding, message(*[0] * 500), "node-a")
    assert len(kept.windows) <= 60
    binding = Binding(inventory, clock)
    assert len(bind(binding, flood, "node-a").windows) == RANKS_PER_NODE
    assert binding.refusals.counts["ranks"] == RANKS_PER_NODE


def test_departures_count_against_the_allowance_like_windows(inventory: Inventory) -> None:
    binding = Binding(inventory, Clock())
    bind(binding, message(0), "node-a")
    gone = WatchRanksResponse(departed=[message(0).windows[0].identity] * 500)
    assert len(bind(binding, gone, "node-a").departed) < 60
    assert binding.refusals.counts["rate"] > 440


def test_many_messages_together_are_bound_each_by_its_own_node(inventory: Inventory) -> None:
    words = [("node-a", message(0)), ("node-b", message(1, pod="pod-1")), ("node-b", message(2, pod="pod-0"))]
    binding = Binding(inventory, Clock())
    accepted = binding.bind([sent(said, node) for node, said in words])
    assert [(window.identity.rank, window.identity.node) for window in accepted.windows] == [
        (0, "node-a"),
        (1, "node-b"),
    ]
    assert binding.refusals.counts == {"other_node": 1}


def test_false_reports_of_a_pod_cost_its_run_no_name(inventory: Inventory) -> None:
    binding = Binding(inventory, Clock())
    for number in range(40):
        assert not bind(binding, message(0, pod="pod-1", job=f"lie:{number}/x"), "node-a").windows
        assert not bind(binding, message(99, pod="pod-1", job=f"lie:{number}/x"), "node-b").windows
    (true,) = bind(binding, message(0, pod="pod-1"), "node-b").windows
    assert true.identity.job == "team/pytorchjob-llama"


def test_a_rank_belongs_to_its_pod_while_that_reports_it(inventory: Inventory) -> None:
    clock = Clock()
    binding = Binding(inventory, clock)
    assert len(bind(binding, message(0, 1), "node-a").windows) == 2
    usurped = bind(binding, message(0, 2, pod="pod-1"), "node-b")
    assert [window.identity.rank for window in usurped.windows] == [2]
    assert binding.refusals.counts["rank_taken"] == 1
    departed = WatchRanksResponse(departed=[message(0, pod="pod-1").windows[0].identity])
    assert not bind(binding, departed, "node-b").departed  # nor may it say that another's rank has ended
    clock.now += OWNED_SECONDS + 1
    assert len(bind(binding, message(0, pod="pod-1"), "node-b").windows) == 1


def test_an_ended_rank_or_pod_frees_the_rank_at_once(inventory: Inventory) -> None:
    binding = Binding(inventory, Clock())
    bind(binding, message(0, 1), "node-a")
    bind(binding, WatchRanksResponse(departed=[message(0).windows[0].identity]), "node-a")
    assert len(bind(binding, message(0, pod="pod-1"), "node-b").windows) == 1
    inventory.deleted("pod-0")
    assert len(bind(binding, message(1, pod="pod-1"), "node-b").windows) == 1


def test_what_is_known_of_nodes_and_runs_goes_with_them(inventory: Inventory) -> None:
    binding = Binding(inventory, Clock())
    bind(binding, message(0), "node-a")
    bind(binding, message(1, pod="pod-1"), "node-b")
    binding.forget_all_but(set(inventory.runs()), {"node-b"})
    assert list(binding._senders) == ["node-b"]
    assert list(binding._owners) == list(inventory.runs())
    binding.forget_all_but(set(), {"node-b"})
    assert not binding._owners
