"""The sampler against a stand-in that publishes figures as DDP does: of a sampled iteration, at the next forward."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest

from rankscope.probe.ddp import CUDA_COST_BUDGET_RATIO, CUDA_SAMPLE_SECONDS, NOT_MEASURED, RECENT_STEP_TIMES, DdpSampler


class Ddp:
    def __init__(self, cuda: bool = False) -> None:
        self.iteration = 0
        self.published: dict[str, int] = {"iteration": 0}
        self.rate = 100
        self.reads = 0
        self._cuda = cuda
        self.logger = self

    def forward(self) -> None:
        if self.iteration and (self.iteration <= 10 or self.iteration % self.rate == 0):
            self.published = {
                "iteration": self.iteration,
                "forward_compute_time": self.iteration,
                "backward_compute_time": 20,
                "backward_comm_time": 30,
                "backward_compute_comm_overlap_time": 10,
            }
        self.iteration += 1

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


def test_figures_read_at_a_boundary_are_those_of_the_step_before(sampler: DdpSampler) -> None:
    model = Ddp()
    forward = []
    for boundary in range(6):
        model.forward()
        forward.append(sampler.read(boundary)[0])
    assert math.isnan(forward[0])
    assert [round(seconds * 1e9) for seconds in forward[1:]] == [1, 2, 3, 4, 5]


def test_with_a_rate_only_boundaries_with_new_figures_are_read(sampler: DdpSampler) -> None:
    model = Ddp(cuda=True)
    sampler.tune(0.05)
    assert model.rate == math.ceil(CUDA_SAMPLE_SECONDS / (CUDA_COST_BUDGET_RATIO * 0.05))
    found = []
    for boundary in range(200):
        model.forward()
        if sampler.read(boundary) != NOT_MEASURED:
            found.append(boundary)
    late = [boundary for boundary in found if boundary > 20]
    assert {b - a for a, b in itertools.pairwise(late)} == {model.rate}
    assert model.reads <= len(found) + 2 * model.rate


def test_the_rate_follows_the_step_time_within_the_cost_budget(sampler: DdpSampler) -> None:
    model = Ddp(cuda=True)
    for step_seconds in (0.005, 0.05, 1.0):
        for _ in range(RECENT_STEP_TIMES):
            sampler.tune(step_seconds)
        assert CUDA_SAMPLE_SECONDS / model.rate <= CUDA_COST_BUDGET_RATIO * step_seconds
    assert model.rate == 1


def test_a_pause_does_not_make_ddp_time_every_step(sampler: DdpSampler) -> None:
    model = Ddp(cuda=True)
    for _ in range(RECENT_STEP_TIMES):
        sampler.tune(0.006)
    before = model.rate
    sampler.tune(1.5)  # one step during an evaluation
    sampler.tune(0.006)
    assert model.rate == before


def test_iterations_that_all_synchronise_in_one_step_are_scaled_up(sampler: DdpSampler) -> None:
    model = Ddp()
    sampler.tune(10.0)
    communication = []
    for boundary in range(10):
        for _ in range(4):
            model.forward()
        communication.append(sampler.read(boundary)[2])
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
    assert sampler.read(1) == NOT_MEASURED or all(math.isnan(value) for value in sampler.read(1))
    sampler.tune(1.0)
