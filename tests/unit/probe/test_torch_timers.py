from __future__ import annotations

import inspect
import signal
import threading
import time
from types import FrameType, SimpleNamespace

import pytest

from rankscope.probe import torch_timers
from rankscope.probe.collective_spans import Spans
from rankscope.probe.failure import disable, switch


def tally_of_this_thread() -> torch_timers.Tally:
    tally = torch_timers.Tally()
    tally.thread_id = threading.get_ident()
    return tally


def test_results_exceptions_signature_and_name_pass_through() -> None:
    def save(obj: object, f: str, pickle_protocol: int = 2) -> str:
        "Saves."
        if f == "full":
            raise OSError("no space")
        return f

    wrapped = torch_timers.timed(save, tally_of_this_thread(), torch_timers.CHECKPOINT)
    assert wrapped(1, f="x") == "x"
    assert inspect.signature(wrapped) == inspect.signature(save)
    assert (wrapped.__name__, wrapped.__doc__) == ("save", "Saves.")
    with pytest.raises(OSError, match="no space"):
        wrapped(1, "full")


def test_a_nested_timed_call_counts_once_for_the_outer_cause() -> None:
    tally = tally_of_this_thread()
    inner = torch_timers.timed(lambda: time.sleep(0.002), tally, torch_timers.BLOCKING)
    outer = torch_timers.timed(inner, tally, torch_timers.INPUT)
    outer()
    assert tally.ledger[torch_timers.INPUT] >= 2_000_000
    assert tally.ledger[torch_timers.BLOCKING] == 0
    inner()
    assert tally.ledger[torch_timers.BLOCKING] >= 2_000_000


def test_calls_that_raise_are_counted_each_time() -> None:
    tally = tally_of_this_thread()

    def fails() -> None:
        raise RuntimeError

    wrapped = torch_timers.timed(fails, tally, torch_timers.BLOCKING)
    spent = []
    for _ in range(2):
        with pytest.raises(RuntimeError):
            wrapped()
        spent.append(tally.ledger[torch_timers.BLOCKING])
    assert 0 < spent[0] < spent[1]


def test_other_threads_are_not_counted() -> None:
    tally = tally_of_this_thread()
    wrapped = torch_timers.timed(lambda: None, tally, torch_timers.INPUT)
    thread = threading.Thread(target=wrapped)
    thread.start()
    thread.join()
    assert tally.ledger[torch_timers.INPUT] == 0


def test_a_users_signal_handler_exception_passes_through_a_running_hook() -> None:
    def handler(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("the user's own time-out")

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(TimeoutError, match="the user's own"):
            try:
                signal.raise_signal(signal.SIGUSR1)
            except TimeoutError as error:  # a hook catches every Exception
                disable(error)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert switch.on


def test_backward_passes_are_timed_once_and_by_the_training_thread() -> None:
    """One may run inside another, where activations are computed again; and one may raise."""
    tally = tally_of_this_thread()
    torch = SimpleNamespace(compiler=SimpleNamespace(is_compiling=lambda: False), distributed=SimpleNamespace())
    autograd = SimpleNamespace()

    def run(depth: int) -> None:
        time.sleep(0.002)
        if depth:
            autograd._engine_run_backward(depth - 1)
        else:
            raise RuntimeError("out of memory")

    autograd._engine_run_backward = run
    Spans(torch, tally).install_backward(autograd, look=lambda: None, passed=lambda: None)
    start_ns = time.monotonic_ns()
    with pytest.raises(RuntimeError, match="out of memory"):
        autograd._engine_run_backward(2)
    assert 6e6 <= tally.ledger[torch_timers.BACKWARD] <= time.monotonic_ns() - start_ns
    tally.ledger[torch_timers.BACKWARD], tally.thread_id = 0, tally.thread_id + 1
    with pytest.raises(RuntimeError):
        autograd._engine_run_backward(0)
    assert tally.ledger[torch_timers.BACKWARD] == 0


def test_outermost_passes_that_accumulate_gradients_are_told() -> None:
    """Not those inside another, where activations are computed again, nor those of autograd.grad."""
    torch = SimpleNamespace(compiler=SimpleNamespace(is_compiling=lambda: False), distributed=SimpleNamespace())
    autograd, passed = SimpleNamespace(), []

    def run(depth: int, accumulate_grad: bool) -> None:
        if depth < 0:
            raise RuntimeError("out of memory")
        if depth:
            autograd._engine_run_backward(depth - 1, accumulate_grad=accumulate_grad)

    autograd._engine_run_backward = run
    Spans(torch, tally_of_this_thread()).install_backward(autograd, lambda: None, lambda: passed.append(1))
    autograd._engine_run_backward(2, accumulate_grad=True)
    assert len(passed) == 1
    autograd._engine_run_backward(2, accumulate_grad=False)
    with pytest.raises(RuntimeError):
        autograd._engine_run_backward(-1, accumulate_grad=True)
    assert len(passed) == 1
    autograd._engine_run_backward(0, accumulate_grad=True)
    assert len(passed) == 2


def test_waits_for_futures_count_while_rpc_is_in_use() -> None:
    class Future:
        def wait(self) -> str:
            time.sleep(0.002)
            return "answer"

    torch = SimpleNamespace(compiler=SimpleNamespace(is_compiling=lambda: False), distributed=SimpleNamespace())
    tally, active = tally_of_this_thread(), False
    Spans(torch, tally).install_rpc(Future, lambda: active)
    assert Future().wait() == "answer"
    assert tally.ledger[torch_timers.BLOCKING] == 0
    active = True
    assert Future().wait() == "answer"
    assert tally.ledger[torch_timers.BLOCKING] >= 2_000_000
