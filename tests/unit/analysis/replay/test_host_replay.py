"""Are the steps of a job on CPUs replayed, with the waits that its traces do not show?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from rankscope.analysis.replay.changes import CHANGES
from rankscope.analysis.replay.graph import ReplayError
from rankscope.analysis.replay.host_graph import build_host_graph
from rankscope.analysis.replay.job import build_graphs
from rankscope.analysis.replay.prediction import Forecast, Prediction, forecast
from rankscope.analysis.traces.trace import Category, Trace
from tests.unit.analysis.replay.made_steps import Host
from tests.unit.analysis.traces.trace_builder import make_trace

BACKWARD = "autograd::engine::evaluate_function: AddmmBackward0"
STEPS = 5


def stepping(do: Callable[[Host], None], host: Host | None = None) -> Trace:
    host = host or Host()
    for step in range(STEPS):
        began = host.now
        do(host)
        host.annotate(f"ProfilerStep#{step}", began)
    return host.trace()


def named(found: Forecast, name: str) -> Prediction:
    return next(one for one in found.predictions if one.name == name)


def changed(traces: dict[int, Trace], name: str) -> float:
    """Microseconds of the step; the replay of the job as it was is exact."""
    found = forecast(traces, [[one for one in CHANGES if one.name == name]])
    assert found.error_ratio == pytest.approx(0.0, abs=0.001)
    assert found.predictions[0].step_ns is not None, found.predictions[0].reason
    return found.predictions[0].step_ns / 1e3


def reducing_each(host: Host) -> None:
    """The hand-written loop: 1 ms of work, then two transfers of 2 ms, each waited for."""
    host.compute(1000.0)
    for _ in range(2):
        host.wait(host.start(2000.0))
    host.compute(500.0)


def test_a_host_that_waits_follows_its_transfers() -> None:
    trace = stepping(reducing_each)
    graph = build_host_graph(trace)
    assert (graph.waits_for >= 0).sum() == 2 * STEPS
    whole = 1000 + 500 + 2 * (10 + 2000 + 5)
    assert changed({0: trace}, "link") == pytest.approx(whole - 2010, rel=0.001)


def in_buckets(host: Host, event_ends_late: float = 0.0) -> None:
    """DDP: the first bucket is hidden by the rest of the backward pass, the second one is waited for."""
    host.compute(1000.0)
    host.compute(500.0, BACKWARD)
    first = host.start(800.0)
    host.compute(1000.0, BACKWARD)
    second = host.start(600.0, lane=3, event_ends_late=event_ends_late)
    host.compute(100.0, BACKWARD)
    host.wait(max(first, second))
    for _ in range(20):
        host.compute(14.0, "aten::copy_")
        host.sleep(1.0)


def test_a_bucket_that_is_hidden_costs_nothing() -> None:
    whole = 1000 + 500 + 8 + 1000 + 10 + 600 + 5 + 300
    assert changed({0: stepping(in_buckets)}, "link") == pytest.approx(whole - 305, rel=0.001)
    assert changed({0: stepping(in_buckets)}, "overlap") == pytest.approx(whole - 600 + 98, rel=0.001)


def test_a_transfer_recorded_too_long_ends_with_its_wait() -> None:
    """Its thread had woken the host and was not scheduled. The host runs several operators before it is."""
    trace = stepping(lambda host: in_buckets(host, event_ends_late=80.0))
    assert (build_host_graph(trace).waits_for >= 0).sum() == 2 * STEPS
    assert changed({0: trace}, "link") == pytest.approx(3423 - 305, rel=0.001)


def test_a_host_that_sleeps_does_not_wait() -> None:
    """The transfer ends early in 50 ms that the host has nothing to do with it."""

    def step(host: Host) -> None:
        host.compute(1000.0)
        host.start(2000.0)
        host.compute(100.0)
        host.sleep(50_000.0)
        host.compute(100.0)

    trace = stepping(step)
    assert not (build_host_graph(trace).waits_for >= 0).any()
    assert changed({0: trace}, "link") == pytest.approx(51_208, rel=0.001)


def test_a_wait_within_an_operator_is_seen() -> None:
    """Tensor parallelism: an autograd function that reduces."""

    def step(host: Host) -> None:
        began = host.now
        host.compute(100.0)
        host.wait(host.start(2000.0))
        host.events.append(("ReduceFunction", Category.CPU_OP, began, host.now - began))
        host.compute(1000.0)

    assert changed({0: stepping(step)}, "link") == pytest.approx(1000 + 100 + 5 + 2010 / 2, rel=0.001)


def test_input_of_a_single_process_is_replayed() -> None:
    def step(host: Host) -> None:
        host.read(3000.0)
        host.compute(1000.0)

    found = forecast({0: stepping(step)})
    assert named(found, "input").step_ns == pytest.approx(1e6, rel=0.001)
    reasons = {one.name: one.reason for one in found.predictions if one.gain_ratio is None}
    assert reasons == {
        **dict.fromkeys(("fused", "graph", "bf16", "tf32", "compile", "recompute"), "the job runs on the CPU"),
        **dict.fromkeys(("batch2", "accumulate4", "bucket5", "bucket100"), "the job runs on the CPU"),
        "overlap": "the job does not communicate",
        "link": "the job does not communicate",
        "even": "it needs the traces of several ranks",
    }


def job_of(before: Sequence[Callable[[Host], None]]) -> dict[int, Trace]:
    """Ranks that do something, work for 1 ms, and reduce in 400 µs once the last of them has come."""
    hosts = [Host(rank) for rank in range(len(before))]
    for step in range(STEPS):
        began = [host.now for host in hosts]
        for host, do in zip(hosts, before, strict=True):
            do(host)
            host.compute(1000.0)
        until = max(host.now + 10.0 for host in hosts) + 400.0
        for host, start in zip(hosts, began, strict=True):
            host.wait(host.start(0.0, until=until))
            host.compute(300.0)
            host.annotate(f"ProfilerStep#{step}", start)
    return {host.rank: host.trace() for host in hosts}


def sleeping(milliseconds: float) -> Callable[[Host], None]:
    return lambda host: host.sleep(1000 * milliseconds)


def reading(milliseconds: float) -> Callable[[Host], None]:
    return lambda host: host.read(1000 * milliseconds)


EVEN_US = 1000 + 10 + 400 + 5 + 300


def test_a_straggler_holds_up_the_others() -> None:
    traces = job_of([sleeping(0), sleeping(0), sleeping(5), sleeping(0)])
    assert {int((graph.collective >= 0).sum()) for graph in build_graphs(traces).values()} == {STEPS}
    assert changed(traces, "even") == pytest.approx(EVEN_US, rel=0.01)
    # What is overlapped still has to wait for the last rank.
    assert changed(traces, "overlap") > 5000 + 1000


@pytest.mark.parametrize("slow", [[1], [0, 1, 2, 3]], ids=["one rank", "all ranks"])
def test_slow_input_of_some_ranks_is_removed(slow: list[int]) -> None:
    traces = job_of([reading(4) if rank in slow else sleeping(0) for rank in range(4)])
    assert changed(traces, "input") == pytest.approx(EVEN_US, rel=0.01)


def test_even_ranks_have_nothing_to_gain() -> None:
    traces = job_of([sleeping(1.0), sleeping(1.01), sleeping(1.0), sleeping(1.01)])
    assert changed(traces, "even") == pytest.approx(1000 + EVEN_US, rel=0.01)


def test_the_profiler_does_not_slow_a_sleep() -> None:
    """Operators take half of their recorded time without it."""

    def step(host: Host) -> None:
        host.sleep(20_000.0)
        for _ in range(10):
            host.compute(200.0)

    found = forecast({0: stepping(step)}, true_step_ns=21e6)
    assert found.step_ns == pytest.approx(21e6, rel=0.001)
    assert found.host_factor == pytest.approx(0.5, abs=0.01)


def test_a_trace_without_steps_is_one_step() -> None:
    host = Host()
    host.compute(1000.0)
    host.wait(host.start(2000.0))
    host.compute(1000.0)
    assert changed({0: host.trace()}, "link") == pytest.approx(4023 - 1000, rel=0.01)


@pytest.mark.parametrize(
    ("name", "category"), [("cudaLaunchKernel", Category.RUNTIME), ("nccl:all_reduce", Category.USER_ANNOTATION)]
)
def test_a_device_that_was_not_recorded_is_refused(name: str, category: Category) -> None:
    events = [("aten::mm", Category.CPU_OP, 0.0, 100.0), (name, category, 10.0, 5.0)]
    with pytest.raises(ReplayError, match="nothing ran on a device"):
        build_host_graph(make_trace(events))


def test_a_trace_without_operators_is_refused() -> None:
    with pytest.raises(ReplayError, match="no operators"):
        build_host_graph(make_trace([]))


def test_a_forged_trace_is_replayed_or_refused() -> None:
    """Events at any time on any thread, transfers within transfers, steps within steps."""
    names = ["aten::mm", BACKWARD, "c10d::allreduce_", "gloo:all_reduce", "ProfilerStep#1", "ProfilerStep#2"]
    random = np.random.default_rng(1)
    for _ in range(40):
        events = []
        for _ in range(int(random.integers(1, 40))):
            name = names[int(random.integers(len(names)))]
            category = Category.USER_ANNOTATION if name[0] in "gP" else Category.CPU_OP
            where = {"thread": int(random.integers(3))}
            events.append((name, category, float(random.integers(50)), float(random.integers(30)), where))
        trace = make_trace(events)
        try:
            found = forecast({0: trace, 1: trace})
        except ReplayError:
            continue
        assert all(one.step_ns is None or one.step_ns >= 0 for one in found.predictions)
