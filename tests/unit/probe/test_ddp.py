"""The sampler against a stand-in that publishes figures as DDP does: of a sampled iteration, at the next forward."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest

from rankscope.probe.ddp import CUDA_SAMPLE_SECONDS, NOT_MEASURED, DdpSampler


class Ddp:
    def __init__(self, cuda: bool = False) -> None:
        self.iteration = 0
        self.timed = 0  # the iteration that was measured last
        self.published: dict[str, int] = {"iteration": 0}
        self.rate = 100
        self.reads = 0
        self._cuda = cuda
        self.logger = self

    def forward(self) -> None:
        if self._is_sampled():
            self.published = {
                "iteration": self.iteration,
                "forward_compute_time": self.timed,
                "backward_compute_time": 20,
                "backward_comm_time": 30,
                "backward_compute_comm_overlap_time": 10,
            }
        self.iteration += 1
        if self._is_sampled():
            self.timed = self.iteration

    def _is_sampled(self) -> bool:
        return self.iteration > 0 and (self.iteration <= 10 or self.iteration % self.rate == 0)

    def _get_ddp_logging_data(self) -> SimpleNamespace:
        self.reads += 1
        return SimpleNamespace(ints_map=dict(self.published))

    def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
        self.rate = rate

    def parameters(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(is_cuda=self._cuda)]


@pytest.fixture
def sampler() -> DdpSampler:
    sampler = DdpSampler()
    sampler.watch(Ddp)
    return sampler


def test_figures_at_a_boundary_belong_to_the_step_before(sampler: DdpSampler) -> None:
    model = Ddp()
    forward = []
    for boundary in range(6):
        model.forward()
        forward.append(sampler.read(boundary).get("ddp_forward_seconds", math.nan))
    assert math.isnan(forward[0])
    assert [round(seconds * 1e9) for seconds in forward[1:]] == [1, 2, 3, 4, 5]


def test_with_a_rate_only_boundaries_with_new_figures_are_read(sampler: DdpSampler) -> None:
    model = Ddp(cuda=True)
    sampler.tune(0.05, 0)
    # At least what the budget asks for, and neither even nor a multiple of five.
    assert (math.ceil((CUDA_SAMPLE_SECONDS + 40e-6) / 5e-5), model.rate) == (5, 7)
    found = []
    for boundary in range(200):
        model.forward()
        if sampler.read(boundary) != NOT_MEASURED:
            found.append(boundary)
    late = [boundary for boundary in found if boundary > 20]
    assert {b - a for a, b in itertools.pairwise(late)} == {model.rate}
    assert model.reads <= len(found) + 2 * model.rate


@pytest.mark.parametrize("is_inside_step", [False, True])
def test_no_figures_of_older_steps_are_taken_after_rate_changes(sampler: DdpSampler, is_inside_step: bool) -> None:
    model = Ddp(cuda=True)
    found = {}
    for boundary in range(1, 200):
        model.forward()
        if is_inside_step and boundary % 37 == 0:
            sampler.tune(0.05 if boundary % 2 else 1.0, boundary - 1)
        figures = sampler.read(boundary)
        if figures != NOT_MEASURED:
            found[boundary] = round(figures["ddp_forward_seconds"] * 1e9)
        if not is_inside_step and boundary % 37 == 0:
            sampler.tune(0.05 if boundary % 2 else 1.0, boundary)
    assert len(found) > 80
    assert all(iteration == boundary - 1 for boundary, iteration in found.items()), found


def test_the_rate_follows_step_length_to_bound_the_cost(sampler: DdpSampler) -> None:
    model = Ddp(cuda=True)
    for step_seconds in (0.005, 0.05, 1.0):
        sampler.tune(step_seconds, 0)
        assert CUDA_SAMPLE_SECONDS / model.rate <= 0.001 * step_seconds
    assert model.rate == 1


def test_iterations_that_all_synchronise_in_one_step_are_scaled_up(sampler: DdpSampler) -> None:
    model = Ddp()
    sampler.tune(10.0, 0)
    communication = []
    for boundary in range(10):
        for _ in range(4):
            model.forward()
        communication.append(sampler.read(boundary).get("ddp_communication_seconds"))
    assert communication[-1] == pytest.approx(4 * 30e-9)


def test_a_model_that_is_no_longer_trained_is_hardly_read(sampler: DdpSampler) -> None:
    model = Ddp()
    for boundary in range(10_000):
        sampler.read(boundary)
    assert model.reads < 10_000 / 7


def test_a_model_that_is_gone_does_not_hurt(sampler: DdpSampler) -> None:
    model = Ddp()
    model.forward()
    del model
    assert sampler.read(1) == NOT_MEASURED
    sampler.tune(1.0, 1)
