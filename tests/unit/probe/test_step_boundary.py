"""The hooks, driven as torch drives them: every optimizer step calls `before` and `after`."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from rankscope.probe import step_boundary, torch_timers
from rankscope.probe.failure import switch
from rankscope.probe.step_boundary import PASSES_NEEDED, BackwardSteps

Hook = Callable[[Any, Any, Any], None]


class Optimizer:
    pass


class Loop:
    """Stands for torch's optimizer module and for the session."""

    def __init__(self) -> None:
        self.tally = torch_timers.Tally()
        self.pre: Hook
        self.post: Hook
        self.fails = False
        self.flush_every_ns = 0
        self.is_compiling = False
        loop = self

        class Scaler:
            """Leaves the optimizer's step out when it finds an overflow."""

            def step(self, optimizer: object, overflows: bool = False) -> None:
                if not overflows:
                    loop.step(optimizer)

        class Graph:
            """Holds what was called while it was captured, which replays do not call."""

            def capture_begin(self, pool: object = None) -> None:
                loop.is_capturing = True

            def capture_end(self) -> None:
                loop.is_capturing = False

            def replay(self) -> str:
                return "replayed"

        self.is_capturing = False
        self.scaler, self.graph_class = Scaler(), Graph
        cuda = SimpleNamespace(CUDAGraph=Graph, is_current_stream_capturing=lambda: self.is_capturing)
        self.mark, self.mark_implicitly = step_boundary.install_optimizer_hooks(
            self, self.tally, self.flush, lambda: self.is_compiling, Scaler, cuda
        )

    def register_optimizer_step_pre_hook(self, hook: Hook) -> None:
        self.pre = hook

    def register_optimizer_step_post_hook(self, hook: Hook) -> None:
        self.post = hook

    def flush(self, now_ns: int) -> int:
        if self.fails:
            raise ValueError("the ring is\nbroken")
        return now_ns + self.flush_every_ns

    def step(self, optimizer: object) -> None:
        self.pre(optimizer, (), {})
        self.post(optimizer, (), {})

    @property
    def steps(self) -> int:
        return self.tally.ledger[torch_timers.STEPS]


@pytest.fixture(autouse=True)
def _switch_is_restored() -> Iterator[None]:
    yield
    switch.on = True
    switch.when_disabled.clear()


def test_two_optimizers_in_turn_make_one_step_per_pair() -> None:
    loop, generator, critic = Loop(), Optimizer(), Optimizer()
    for _ in range(100):
        loop.step(critic)
        loop.step(generator)
    assert loop.steps == 100


def test_one_optimizer_per_parameter_makes_one_step_per_round() -> None:
    loop, many = Loop(), [Optimizer() for _ in range(300)]
    for _ in range(10):
        for optimizer in many:
            loop.step(optimizer)
    assert loop.steps == 10


def test_another_optimizer_takes_over_when_the_first_falls_silent() -> None:
    loop, first, second = Loop(), Optimizer(), Optimizer()
    loop.step(first)
    for _ in range(step_boundary.RE_ELECT_AFTER_STEPS + 9):
        loop.step(second)
    assert loop.steps == 1 + 10


def test_a_deleted_optimizer_is_replaced_at_once_and_not_retained() -> None:
    loop, first = Loop(), Optimizer()
    loop.step(first)
    del first
    gc.collect()
    second = Optimizer()
    for _ in range(5):
        loop.step(second)
    assert loop.steps == 6


def test_explicit_steps_are_the_only_ones_once_they_begin() -> None:
    loop, optimizer = Loop(), Optimizer()
    loop.step(optimizer)
    for _ in range(3):
        loop.step(optimizer)
        loop.mark()
    assert loop.steps == 2 + 3


def test_an_optimizer_inside_another_is_timed_once() -> None:
    loop, outer, inner = Loop(), Optimizer(), Optimizer()
    wait = torch_timers.timed(lambda: None, loop.tally, torch_timers.BLOCKING)
    loop.tally.thread_id = step_boundary.training_thread_id()
    loop.pre(outer, (), {})
    loop.step(inner)
    spent = loop.tally.ledger[torch_timers.OPTIMIZER]
    wait()
    loop.post(outer, (), {})
    assert loop.tally.ledger[torch_timers.OPTIMIZER] == spent


def test_a_step_that_raised_leaves_nothing_behind() -> None:
    loop, optimizer = Loop(), Optimizer()
    loop.pre(optimizer, (), {})  # and the step raises: no post hook
    loop.step(optimizer)
    assert loop.steps == 1
    assert loop.tally.ledger[torch_timers.OPTIMIZER_STARTED] == 0


def test_an_exception_disables_the_probe_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    loop, optimizer = Loop(), Optimizer()
    loop.fails = True
    for _ in range(3):
        loop.step(optimizer)
        loop.mark()
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["rankscope: probe disabled: ValueError: the ring is broken; training is not affected"]
    assert loop.steps == 1


def test_a_step_skipped_by_the_scaler_counts_once() -> None:
    loop, model, other = Loop(), Optimizer(), Optimizer()
    for number in range(20):
        loop.scaler.step(model, overflows=number % 5 == 4)
        loop.scaler.step(other, overflows=number % 5 == 4)
    assert loop.steps == 20


def test_between_two_records_the_same_is_counted() -> None:
    loop, optimizer, other = Loop(), Optimizer(), Optimizer()
    loop.flush_every_ns = 10**15
    for _ in range(5):
        loop.step(optimizer)
    assert loop.steps == 5 and 0 < loop.tally.ledger[torch_timers.OPTIMIZER] < 10**12
    loop.step(other)
    assert loop.steps == 5, "of another optimizer"
    loop.pre(optimizer, (), {})
    loop.step(other)  # inside the step of the first
    loop.post(optimizer, (), {})
    loop.scaler.step(optimizer, overflows=True)
    assert loop.steps == 7 and loop.tally.ledger[torch_timers.OPTIMIZER] < 10**12
    loop.step(optimizer)
    loop.mark()
    loop.step(optimizer)
    assert loop.steps == 9, "steps that are marked replace those of optimizers"


def test_a_probe_disabled_between_two_records_counts_no_more_steps() -> None:
    loop, optimizer = Loop(), Optimizer()
    loop.flush_every_ns = 10**15
    for _ in range(3):
        loop.step(optimizer)
    step_boundary.disable(ValueError("the ring is broken"))
    loop.step(optimizer)
    assert loop.steps == 3


def captured(loop: Loop, *optimizers: object) -> Any:
    graph = loop.graph_class()
    graph.capture_begin(pool=1)
    for optimizer in optimizers:
        loop.step(optimizer)
    graph.capture_end()
    return graph


def test_each_replay_of_a_captured_step_counts() -> None:
    loop, optimizer = Loop(), Optimizer()
    loop.flush_every_ns = 1 << 60
    for _ in range(3):
        loop.step(optimizer)
    graph = captured(loop, optimizer)
    assert loop.steps == 3, "a capture runs nothing"
    assert [graph.replay() for _ in range(5)] == ["replayed"] * 5
    loop.step(optimizer)
    assert loop.steps == 9


def test_replays_of_graphs_without_a_step_count_nothing() -> None:
    loop, optimizer = Loop(), Optimizer()
    forward, whole = captured(loop), captured(loop, optimizer)
    for _ in range(3):
        forward.replay()
        whole.replay()
    assert loop.steps == 3
    whole.capture_begin()
    whole.capture_end()
    whole.replay()
    assert loop.steps == 3, "it was captured again, without the optimizer"


def test_a_graph_with_several_optimizers_is_one_step() -> None:
    loop, optimizers = Loop(), [Optimizer() for _ in range(3)]
    graph = captured(loop, *optimizers)
    graph.replay()
    assert loop.steps == 1


def test_a_graph_outlives_its_optimizer_and_is_not_retained() -> None:
    loop, optimizer = Loop(), Optimizer()
    graph = captured(loop, optimizer)
    graph.replay()
    del optimizer
    gc.collect()
    graph.replay()
    assert loop.steps == 2
    reference = weakref.ref(graph)
    del graph
    gc.collect()
    assert reference() is None


def test_a_capture_that_fails_to_begin_leaves_nothing_behind() -> None:
    loop, optimizer = Loop(), Optimizer()
    with pytest.raises(TypeError):
        loop.graph_class().capture_begin(unknown=1)
    loop.is_capturing = True
    loop.step(optimizer)
    assert loop.steps == 1


def test_backward_passes_are_steps_where_no_optimizer_is_made() -> None:
    loop = Loop()
    steps = BackwardSteps(loop.mark_implicitly)
    for _ in range(PASSES_NEEDED + 4):
        steps.passed()
    assert loop.tally.ledger[torch_timers.STEPS] == 5


def test_backward_passes_are_no_steps_once_an_optimizer_is_made() -> None:
    class Made:
        def __init__(self, rate: float) -> None:
            self.rate = rate

    loop = Loop()
    steps = BackwardSteps(loop.mark_implicitly)
    steps.watch(Made)
    assert Made(0.1).rate == 0.1
    for _ in range(PASSES_NEEDED + 4):
        steps.passed()
    assert loop.tally.ledger[torch_timers.STEPS] == 0


def test_backward_passes_are_no_steps_once_an_optimizer_steps() -> None:
    """Unpickled, it was never made in this process."""
    loop, optimizer = Loop(), Optimizer()
    steps = BackwardSteps(loop.mark_implicitly)
    for _ in range(PASSES_NEEDED + 4):
        steps.passed()
        loop.step(optimizer)
    assert loop.steps == PASSES_NEEDED + 4


def test_backward_passes_are_no_steps_where_steps_are_marked() -> None:
    loop = Loop()
    steps = BackwardSteps(loop.mark_implicitly)
    loop.mark()
    for _ in range(PASSES_NEEDED + 4):
        steps.passed()
    assert loop.tally.ledger[torch_timers.STEPS] == 1
