from __future__ import annotations

from rankscope.analysis.verdicts.verdict import Kind, Severity, Verdict
from rankscope.operator.correlation.correlator import JobState
from rankscope.operator.runs.slow_nodes import CONDITION, read_node, slow_nodes
from rankscope.v1.identity_pb2 import RankIdentity
from rankscope.v1.window_pb2 import RankWindow


def state(culprits: tuple[int, ...], kind: Kind = Kind.SLOW_RANK, severity: Severity = Severity.ALARM) -> JobState:
    """Two ranks on each of three nodes."""
    windows = tuple(RankWindow(identity=RankIdentity(rank=rank, node="abc"[rank // 2])) for rank in range(6))
    return JobState("t/r", 6, Verdict(kind, "", severity, culprits=culprits), 0.0, 0.0, 6, None, None, None, windows)


def test_only_nodes_with_all_ranks_slow_among_others_are_slow() -> None:
    assert slow_nodes(state((2, 3))) == {"b"}
    assert slow_nodes(state((2,))) == frozenset()
    assert slow_nodes(state((1, 2, 3))) == {"b"}
    assert slow_nodes(state(tuple(range(6)))) == frozenset()
    assert slow_nodes(state((2, 3), severity=Severity.WARNING)) == frozenset()
    assert slow_nodes(state((2, 3), Kind.HANG)) == frozenset()


def test_the_condition_tells_for_which_run_it_stands() -> None:
    condition = {"type": CONDITION, "status": "True", "message": "team/pytorchjob-llama: ranks 2, 3: 90 ms"}
    node = {"metadata": {"name": "b", "uid": "u"}, "status": {"conditions": [{"type": "Ready"}, condition]}}
    assert read_node(node).slow_run == "team/pytorchjob-llama"
    condition["status"] = "False"
    assert read_node(node).slow_run == ""
    assert read_node({"metadata": {"name": "b", "uid": "u"}}).slow_run == ""
