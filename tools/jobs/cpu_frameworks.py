"""The loops of `frameworks.py` on CPUs, and loops that run on CPUs only. A model that sleeps simulates a device.

    python3 cpu_frameworks.py LOOP [ARGUMENT …]     runs until it is killed

The launcher sets the fault in the environment, and its first step on a board (a shared file).
Every rank runs the same code; only the slow rank sleeps, and only from that step on."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import frameworks
import torch
import torch.distributed as dist
from frameworks import Network, Setup, loss_of, optimizer_of
from parts import set_up, set_up_torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import Dataset

# Not first: names of this folder's modules win.
sys.path.append(os.environ["RANKSCOPE_FRAMEWORKS_BOARD_FOLDER"])
from board import Board

WIDTH, LAYERS, BATCH, SAMPLES = 64, 3, 4, 65536
# Most of a real step is spent on a device while the host waits. These waits stand for it, on all ranks alike, so that
# four ranks share two cores without their contention drowning everything else. They are of one layer.
DEVICE_FORWARD_SECONDS = 0.004
DEVICE_BACKWARD_SECONDS = 0.006
OVERFLOW_EVERY = 10
MICRO_BATCHES = 4
STAGE_LAYERS, STAGE_WEIGHT = 2, 2.5
TOKENS = 96  # of a rank, in a step
HOT_RANK = 2
# An expert with as many tokens as a rank sends takes as long as so many layers of the model.
EXPERT_LAYERS = 3.0


class Progress:
    """Reports every step to the launcher, and reads whether this rank's fault is on."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        place, slow_rank, seconds = os.environ["RANKSCOPE_FRAMEWORKS_FAULT"].split(",")
        self._fault = place if self.rank == int(slow_rank) else ""
        self._delay_seconds = float(seconds)
        self._board = Board(Path(os.environ["RANKSCOPE_FRAMEWORKS_BOARD"]))
        self._step = 0
        self._active = ""

    def delay(self, place: str, times_a_step: int = 1) -> float:
        """Seconds to sleep at a place that a step passes `times_a_step` times."""
        return self._delay_seconds / times_a_step if self._active == place else 0.0

    def before_optimizer(self) -> None:
        """Has no fault."""

    def step_ended(self) -> None:
        """Call it between two steps."""
        self._board.record_step(self.rank, time.time())  # the launcher needs the time of the step, not its length
        self._step += 1
        begins = self._board.fault_step
        self._active = self._fault if begins is not None and self._step >= begins else ""


progress = Progress()


# The sleep is a custom operator, which the compiler calls as it is, without a graph break.
@torch.library.custom_op("jobs::device_time", mutates_args=())
def device_time(features: torch.Tensor, seconds: float) -> torch.Tensor:
    time.sleep(seconds)
    return features.clone()


@torch.library.custom_op("jobs::normalize_features", mutates_args=())
def normalize_features(features: torch.Tensor, times_a_step: int) -> torch.Tensor:
    time.sleep(progress.delay("host", times_a_step))  # FAULT host
    return features.clone()


@torch.library.custom_op("jobs::scale_gradient", mutates_args=())
def scale_gradient(gradient: torch.Tensor, times_a_step: int) -> torch.Tensor:
    time.sleep(progress.delay("backward", times_a_step))  # FAULT backward
    return gradient.clone()


@torch.library.custom_op("jobs::scaled_backward", mutates_args=())
def scaled_backward(features: torch.Tensor, times_a_step: int) -> torch.Tensor:
    """The identity, with a gradient that takes longer where the fault is in backward."""
    return features.clone()


def keep_argument(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.argument = inputs[1]


for operator in (device_time, normalize_features, scale_gradient, scaled_backward):
    operator.register_fake(lambda features, argument: torch.empty_like(features))
device_time.register_autograd(
    lambda ctx, gradient: (
        device_time(gradient, ctx.argument * DEVICE_BACKWARD_SECONDS / DEVICE_FORWARD_SECONDS),
        None,
    ),
    setup_context=keep_argument,
)
normalize_features.register_autograd(lambda ctx, gradient: (gradient, None))
scaled_backward.register_autograd(
    lambda ctx, gradient: (scale_gradient(gradient, ctx.argument), None), setup_context=keep_argument
)


class SleepingNetwork(Network):
    """`calls_a_step` is how often a step calls it: micro-batches share the time of one step. Layers have a `weight`."""

    def __init__(self, layers: int, calls_a_step: int = 1, weight: float = 1.0) -> None:
        super().__init__(WIDTH, layers)
        self.embedding = nn.Linear(WIDTH, WIDTH)  # so that all layers have gradients of what they are given
        self.calls_a_step = calls_a_step
        self.layer_seconds = DEVICE_FORWARD_SECONDS * weight / calls_a_step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = normalize_features(self.embedding(x), self.calls_a_step)
        for layer in self.layers:
            x = layer(device_time(x, self.layer_seconds))
        return scaled_backward(x, self.calls_a_step)


class Samples(Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self._sample = torch.randn(WIDTH)
        self.a_step = BATCH

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(progress.delay("input", self.a_step))  # FAULT input
        return self._sample


class SleepingSetup(Setup):
    def __init__(self) -> None:
        asked = argparse.Namespace(batch=BATCH, workers=0, cpu=True, folder=Path())
        super().__init__(asked, torch.device("cpu"), progress, progress, Samples())

    def network(self, calls_a_step: int = 1) -> SleepingNetwork:
        self.samples.a_step = BATCH * calls_a_step
        return SleepingNetwork(LAYERS, calls_a_step)


def amp(setup: Setup) -> None:
    """Every tenth step overflows, and the scaler leaves the optimizer's step out. The model stays in float32: many
    processors emulate bfloat16, thirty times slower."""
    model = DistributedDataParallel(setup.network())
    optimizer = optimizer_of(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for number, batch in enumerate(setup.batches(), 1):
        optimizer.zero_grad()
        loss = loss_of(model(batch))
        if number % OVERFLOW_EVERY == 0:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        setup.course.step_ended()


def two_optimizers(setup: Setup) -> None:
    """Two models with an optimizer each, trained against each other in every step, as a GAN is."""
    generator = DistributedDataParallel(setup.network())
    critic = DistributedDataParallel(nn.Linear(WIDTH, 2 * WIDTH))
    generator_optimizer = optimizer_of(generator)
    critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.01)
    for batch in setup.batches():
        critic_optimizer.zero_grad()
        loss_of(critic(batch)).backward()
        critic_optimizer.step()
        generator_optimizer.zero_grad()
        loss_of(generator(batch)).backward()
        generator_optimizer.step()
        setup.course.step_ended()


def pipeline(setup: Setup, stages_text: str) -> None:
    """Four stages, or two stages of two data-parallel ranks each, laid out stage by stage. The mates of a pipeline read
    the same samples."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    stages = int(stages_text)
    mesh = dist.init_device_mesh("cpu", (stages, setup.world // stages), mesh_dim_names=("pp", "dp"))
    mates, replicas = mesh["pp"].get_group(), mesh["dp"].get_group()
    number = mates.rank()
    model = SleepingNetwork(STAGE_LAYERS, MICRO_BATCHES, STAGE_WEIGHT)
    example = torch.zeros(BATCH // MICRO_BATCHES, WIDTH)
    stage = PipelineStage(model, number, stages, setup.device, input_args=(example,), group=mates)
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=lambda output, target: (output - target).square().mean())
    optimizer = optimizer_of(model)
    for batch in setup.batches():
        optimizer.zero_grad()
        schedule.step(*([batch] if number == 0 else []), **({"target": batch} if number == stages - 1 else {}))
        if replicas.size() > 1:
            reduce_gradients(model, replicas)
        optimizer.step()
        setup.course.step_ended()


def reduce_gradients(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = parameters_to_vector(gradients)
    dist.all_reduce(flat, group=group)
    vector_to_parameters(flat.div_(dist.get_world_size(group)), gradients)


def compiled(setup: Setup, framework: str, backend: str) -> None:
    """torch.compile of all of a step's forward and backward."""
    model: nn.Module = frameworks.tensor_sharded(setup) if framework == "tensor_parallel" else setup.network()
    if framework == "fsdp2":
        model = frameworks.fully_sharded(model, dist.init_device_mesh("cpu", (setup.world,)))
    elif framework == "ddp":
        model = DistributedDataParallel(model)
    train = frameworks.hand if framework == "handwritten" else partial(frameworks.loop, foreach=False)
    train(setup, torch.compile(model, backend=backend))


def deepspeed_zero(setup: Setup, stage: str) -> None:
    import deepspeed

    # An operator for inference that would be compiled for two minutes and is not used here.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    model = setup.network()
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": int(stage)},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=config)
    for batch in setup.batches():
        engine.backward(loss_of(engine(batch)))
        engine.step()
        setup.course.step_ended()


class UnevenAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
        ctx.received, ctx.sent = received, sent
        result = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(result, rows.contiguous(), received, sent)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        result = gradient.new_empty(sum(ctx.sent), gradient.shape[1])
        dist.all_to_all_single(result, gradient.contiguous(), ctx.sent, ctx.received)
        return result, None, None


def uneven_experts(setup: Setup, routing: str) -> None:
    """A mixture of experts, one per rank: tokens go to their experts and back by all-to-all. `balanced`, every expert
    gets as many; `skewed`, that of rank 2 gets half of them."""
    from rankscope.probe import count_tokens

    sent = [TOKENS // setup.world] * setup.world  # tokens that each rank sends to each expert
    if routing == "skewed":
        sent = [TOKENS // 2 // (setup.world - 1)] * setup.world
        sent[HOT_RANK] = TOKENS // 2
    model = SleepingNetwork(layers=1)
    expert = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.AdamW([*model.parameters(), *expert.parameters()])
    received = [sent[setup.rank]] * setup.world
    tokens = torch.randn(TOKENS, WIDTH)[: sum(sent)].requires_grad_()
    for batch in setup.batches():
        optimizer.zero_grad()
        loss = loss_of(model(batch))
        routed = UnevenAllToAll.apply(tokens, received, sent)
        count_tokens(len(routed))
        routed = expert(device_time(routed, DEVICE_FORWARD_SECONDS * EXPERT_LAYERS * len(routed) / TOKENS))
        loss = loss + loss_of(UnevenAllToAll.apply(routed, sent, received))
        loss.backward()
        reduce_gradients(model)
        optimizer.step()
        setup.course.step_ended()


def local_sgd(setup: Setup, local_steps: str, kind: str = "") -> None:
    frameworks.local_sgd(setup, int(local_steps), kind == "diloco")


LOOPS: dict[str, Callable[..., None]] = frameworks.FRAMEWORKS | {
    "amp": amp,
    "two_optimizers": two_optimizers,
    "pipeline": pipeline,
    "compiled": compiled,
    "deepspeed_zero": deepspeed_zero,
    "uneven_experts": uneven_experts,
    "local_sgd": local_sgd,
}
# Frameworks that make the process group themselves.
SET_UP_BY_FRAMEWORK = ("hf", "accelerate", "lightning")


def main() -> None:
    loop = sys.argv[1]
    if loop in SET_UP_BY_FRAMEWORK:
        set_up_torch(cpu=True)
    else:
        set_up(cpu=True, timeout=timedelta(minutes=10))
    LOOPS[loop](SleepingSetup(), *sys.argv[2:])


if __name__ == "__main__":
    main()
