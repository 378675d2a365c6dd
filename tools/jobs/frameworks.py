"""The training loops of `framework_job.py` and `cpu_frameworks.py`, each as users of the framework write it. A loop
never returns."""

from __future__ import annotations

import argparse
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, Dataset

ACCUMULATED = 4
MICROBATCHES = 4
LOCAL_STEPS = 10
SMALL_SUMS, SMALL_SUM_VALUES = 100, 1024
EXPERT_LAYERS, EXPERT_WIDENING, EXPERT_TOKENS = 12, 16, 1536


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def no_fault() -> None:
    pass


class Network(nn.Module):
    def __init__(self, width: int, layers: int, slow_down: Callable[[], None] = no_fault) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(width) for _ in range(layers)])
        self._slow_down = slow_down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._slow_down()
        for layer in self.layers:
            x = layer(x)
        return x


class Setup:
    """What a loop needs: device, data, fault, and the callback for each step."""

    def __init__(self, asked: argparse.Namespace, device: torch.device, fault: Any, course: Any, samples: Any) -> None:
        self.asked, self.device, self.fault, self.course, self.samples = asked, device, fault, course, samples
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def network(self, calls_a_step: int = 1) -> Network:
        return Network(self.asked.width, self.asked.layers, self.fault.in_forward).to(self.device)

    def batches(self) -> Iterator[torch.Tensor]:
        """Endless batches on the device."""
        # From memory that is not pinned, a copy may wait for the device.
        loader = DataLoader(
            self.samples,
            batch_size=self.asked.batch,
            num_workers=self.asked.workers,
            pin_memory=not self.asked.cpu,
            drop_last=True,
        )
        while True:
            for batch in loader:
                yield batch.to(self.device, non_blocking=True)


def optimizer_of(model: nn.Module, foreach: bool | None = None) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=foreach)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def loop(setup: Setup, model: nn.Module, foreach: bool | None = None) -> None:
    """The plain loop, for every model that hides its communication in forward and backward."""
    optimizer = optimizer_of(model, foreach)
    for batch in setup.batches():
        optimizer.zero_grad()
        loss_of(model(batch)).backward()
        setup.fault.before_optimizer()
        optimizer.step()
        setup.course.step_ended()


def many_small_sums(setup: Setup) -> None:
    """Layers that sum a little over all ranks, as tensor parallel ones do."""
    model = setup.network()
    values = torch.zeros(SMALL_SUM_VALUES, device=setup.device)
    optimizer = optimizer_of(model)
    for batch in setup.batches():
        optimizer.zero_grad()
        loss = loss_of(model(batch))
        for _ in range(SMALL_SUMS):
            dist.all_reduce(values)
        loss.backward()
        optimizer.step()
        setup.course.step_ended()


def ddp(setup: Setup) -> None:
    loop(setup, DistributedDataParallel(setup.network()))


def ddp_no_sync(setup: Setup) -> None:
    """Gradients of several batches are summed before they are exchanged."""
    model = DistributedDataParallel(setup.network(ACCUMULATED))
    optimizer = optimizer_of(model)
    batches = setup.batches()
    while True:
        optimizer.zero_grad()
        with model.no_sync():
            for _ in range(ACCUMULATED - 1):
                loss_of(model(next(batches))).backward()
        loss_of(model(next(batches))).backward()
        optimizer.step()
        setup.course.step_ended()


def amp(setup: Setup) -> None:
    """With a scale so large that the first steps overflow and are skipped."""
    kind = setup.device.type
    model = DistributedDataParallel(setup.network())
    optimizer = optimizer_of(model)
    scaler = torch.amp.GradScaler(kind, init_scale=2.0**40, growth_interval=200)
    dtype = torch.float16 if kind == "cuda" else torch.bfloat16
    for batch in setup.batches():
        optimizer.zero_grad()
        with torch.autocast(kind, dtype=dtype):
            loss = loss_of(model(batch).float())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        setup.course.step_ended()


def fully_sharded(model: Network, mesh: Any = None) -> Network:
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def fsdp2(setup: Setup) -> None:
    # Where the machine has a GPU, CPUs are not the default.
    mesh = dist.init_device_mesh(setup.device.type, (setup.world,))
    loop(setup, fully_sharded(setup.network(), mesh))


def hsdp(setup: Setup) -> None:
    mesh = dist.init_device_mesh(setup.device.type, (2, setup.world // 2), mesh_dim_names=("replicate", "shard"))
    loop(setup, fully_sharded(setup.network(), mesh))


def fsdp1(setup: Setup) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({Layer})
    model = FullyShardedDataParallel(
        setup.network(), auto_wrap_policy=policy, device_id=setup.device, use_orig_params=True
    )
    loop(setup, model)


def tensor_sharded(setup: Setup) -> Network:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = dist.init_device_mesh(setup.device.type, (setup.world,), mesh_dim_names=("tensor",))
    model = setup.network()
    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def tensor_parallel(setup: Setup) -> None:
    # Layers and norms are DTensors and plain tensors, which foreach does not mix.
    loop(setup, tensor_sharded(setup), foreach=False)


def pipeline(setup: Setup) -> None:
    """A stage for each rank, a layer or more for each stage."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    stage_model = setup.network()
    optimizer = optimizer_of(stage_model)
    stage = PipelineStage(stage_model, setup.rank, setup.world, setup.device)
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=lambda output, target: (output - target).square().mean())
    is_first, is_last = setup.rank == 0, setup.rank == setup.world - 1
    for batch in setup.batches():
        optimizer.zero_grad()
        schedule.step(*([batch] if is_first else []), **({"target": batch} if is_last else {}))
        optimizer.step()
        setup.course.step_ended()


def hand(setup: Setup, model: nn.Module | None = None) -> None:
    """All gradients in one buffer, reduced by one call."""
    model = setup.network() if model is None else model
    parameters = list(model.parameters())
    flat = torch.zeros(sum(one.numel() for one in parameters), device=setup.device)
    views = flat.split([one.numel() for one in parameters])
    for parameter, view in zip(parameters, views, strict=True):
        parameter.grad = view.view_as(parameter)
    optimizer = optimizer_of(model)
    for batch in setup.batches():
        flat.zero_()
        loss_of(model(batch)).backward()
        dist.all_reduce(flat)
        flat /= setup.world
        optimizer.step()
        setup.course.step_ended()


def cuda_graph(setup: Setup) -> None:
    """The whole step is a graph: forward, backward, the collectives and the optimizer."""
    model = setup.network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=setup.device.type == "cuda")
    inputs = torch.zeros(setup.asked.batch, setup.asked.width, device=setup.device)
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)

    def step() -> None:
        for parameter in parameters:
            parameter.grad.zero_()
        x = inputs
        for layer in model.layers:
            x = layer(x)
        loss_of(x).backward()
        for parameter in parameters:
            dist.all_reduce(parameter.grad)
        optimizer.step()

    replay = step if setup.device.type == "cpu" else captured(step)
    for batch in setup.batches():
        inputs.copy_(batch)
        setup.fault.in_forward()
        replay()
        setup.course.step_ended()


def captured(step: Callable[[], None]) -> Callable[[], None]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # Threads of NCCL may look at events of their own meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    replay: Callable[[], None] = graph.replay
    return replay


def default_compiler() -> str:
    """Inductor needs a C compiler and Python's headers for the host's part."""
    has_headers = (Path(sysconfig.get_paths()["include"]) / "Python.h").exists()
    return "inductor" if has_headers and any(map(shutil.which, ("cc", "gcc", "clang"))) else "aot_eager"


def compiled_layers(setup: Setup) -> Network:
    """What slows it down stays outside of what is compiled."""
    model = setup.network()
    for layer in model.layers:
        layer.compile(backend=setup.asked.compiler)
    return model


def compiled_ddp(setup: Setup) -> None:
    loop(setup, DistributedDataParallel(compiled_layers(setup)))


def compiled_fsdp2(setup: Setup) -> None:
    loop(setup, fully_sharded(compiled_layers(setup)))


class WithLoss(nn.Module):
    """A model that returns its loss, as Hugging Face's trainer expects."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.network = setup.network()

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": loss_of(self.network(inputs))}


class Named(Dataset[Any]):
    """The samples by name, as that trainer's collator wants them."""

    def __init__(self, samples: Any) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": self._samples[index]}


def hugging_face(setup: Setup) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Steps(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            setup.course.step_ended()

    arguments = TrainingArguments(
        output_dir=str(setup.asked.folder / "trainer"),
        max_steps=10**8,
        per_device_train_batch_size=setup.asked.batch,
        dataloader_num_workers=setup.asked.workers,
        remove_unused_columns=False,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=setup.asked.cpu,
        ddp_backend="gloo" if setup.asked.cpu else None,
    )
    Trainer(WithLoss(setup), arguments, train_dataset=Named(setup.samples), callbacks=[Steps()]).train()


def accelerate(setup: Setup) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=setup.asked.cpu)
    model = setup.network()
    loader = DataLoader(setup.samples, batch_size=setup.asked.batch, num_workers=setup.asked.workers, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer_of(model), loader)
    while True:
        for batch in loader:
            optimizer.zero_grad()
            accelerator.backward(loss_of(model(batch)))
            optimizer.step()
            setup.course.step_ended()


def lightning(setup: Setup) -> None:
    import pytorch_lightning

    class Module(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = setup.network()

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return loss_of(self.network(batch))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self)

        def on_train_batch_end(self, *_: object) -> None:
            setup.course.step_ended()

    devices = int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = pytorch_lightning.Trainer(
        accelerator="cpu" if setup.asked.cpu else "gpu",
        devices=devices,
        num_nodes=setup.world // devices,
        strategy="ddp",
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(setup.asked.folder),
    )
    loader = DataLoader(setup.samples, batch_size=setup.asked.batch, num_workers=setup.asked.workers, drop_last=True)
    trainer.fit(Module(), loader)


def local_sgd(setup: Setup, local_steps: int = LOCAL_STEPS, is_diloco: bool = False) -> None:
    """Ranks train by themselves, and take the mean of their weights after every so many steps. With DiLoCo, an outer
    optimizer takes what the weights have moved by for a gradient."""
    model = setup.network()
    optimizer = optimizer_of(model)
    weights = list(model.parameters())
    if is_diloco:
        shared = nn.Parameter(parameters_to_vector(weights).detach())
        outer = torch.optim.SGD([shared], lr=0.7, momentum=0.9, nesterov=True)
    for number, batch in enumerate(setup.batches(), 1):
        optimizer.zero_grad()
        loss_of(model(batch)).backward()
        setup.fault.before_optimizer()
        optimizer.step()
        if number % local_steps == 0:
            mean = parameters_to_vector(weights).detach()
            dist.all_reduce(mean)
            mean /= setup.world
            if is_diloco:
                shared.grad = shared.detach() - mean
                outer.step()
                mean = shared.detach()
            vector_to_parameters(mean, weights)
        setup.course.step_ended()


class AllToAll(torch.autograd.Function):
    """As many rows from each rank as go to it."""

    @staticmethod
    def forward(_: Any, rows: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows.contiguous())
        return received

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return AllToAll.forward(None, gradient)


class ExpertLayer(nn.Module):
    """Tokens go to the expert of another rank and back."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, EXPERT_WIDENING * width), nn.Linear(EXPERT_WIDENING * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        routed = self.down(nn.functional.gelu(self.up(AllToAll.apply(x))))
        return x + AllToAll.apply(routed)


def experts(setup: Setup) -> None:
    """A mixture of experts, one for each rank: ranks meet in every layer, and gradients of experts are not shared."""
    width = setup.asked.width
    model = nn.Sequential(*(ExpertLayer(width) for _ in range(EXPERT_LAYERS))).to(setup.device)
    optimizer = optimizer_of(model)
    for batch in setup.batches():
        optimizer.zero_grad()
        setup.fault.in_forward()
        loss_of(model(batch.repeat(EXPERT_TOKENS // len(batch), 1))).backward()
        setup.fault.before_optimizer()
        optimizer.step()
        setup.course.step_ended()


FRAMEWORKS: dict[str, Callable[[Any], None]] = {
    "ddp": ddp,
    "fsdp2": fsdp2,
    "hand": hand,
    "hf": hugging_face,
    "accelerate": accelerate,
    "lightning": lightning,
    "ddp_no_sync": ddp_no_sync,
    "amp": amp,
    "fsdp1": fsdp1,
    "hsdp": hsdp,
    "tp": tensor_parallel,
    "pp": pipeline,
    "cudagraph": cuda_graph,
    "compiled_ddp": compiled_ddp,
    "compiled_fsdp2": compiled_fsdp2,
    "local_sgd": local_sgd,
    "experts": experts,
}
