"""The cells of foreign.py: trainers that are not ours, their layouts, and the faults of one rank."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

SHARE_RANKS = 4  # of a job that takes one share of the cores; one of eight takes two

MEGATRON_FLAGS = """
    --num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512
    --micro-batch-size 4 --global-batch-size 16 --lr 1e-4 --min-lr 1e-5 --train-iters 100000 --lr-decay-iters 1000
    --bf16 --mock-data --split 100,0,0 --tokenizer-type NullTokenizer --vocab-size 4096 --transformer-impl local
    --attention-backend unfused --no-rope-fusion --no-gradient-accumulation-fusion --no-persist-layer-norm
    --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --eval-iters 0 --eval-interval 100000
    --log-interval 5 --distributed-timeout-minutes 2 --exit-duration-in-mins 60"""
NANOGPT_FLAGS = """
    --n_layer=6 --n_embd=384 --n_head=6 --gradient_accumulation_steps=8 --eval_iters=2 --compile=False
    --always_save_checkpoint=False"""
NANOGPT_CPU_FLAGS = """
    --n_layer=2 --n_embd=32 --n_head=2 --block_size=64 --batch_size=2 --eval_iters=1 --compile=False --dtype=float32
    --gradient_accumulation_steps=8 --always_save_checkpoint=False --backend=gloo"""
DEEPSPEED_FLAGS = "--steps=100000000"
DEEPSPEED_CPU_FLAGS = f"{DEEPSPEED_FLAGS} --backend=gloo"
# torch's Adam is used: DeepSpeed compiles its own when a job starts, which needs nvcc.
DEEPSPEED_CONFIG: dict[str, object] = {
    "train_batch_size": 128,
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True}},
    "steps_per_print": 5,
}
DEEPSPEED_CPU_CONFIG = DEEPSPEED_CONFIG | {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 1}


@dataclass(frozen=True)
class Trainer:
    script: str
    flags: str
    layer: str  # whose forward is slowed
    step: re.Pattern[str]  # a line of the log: number and duration of a step
    first_number: int
    log_interval: int
    logs_on_last_rank: bool
    unit_milliseconds: float = 1.0  # of the duration in the log
    cpu_flags: str | None = None  # instead of `flags`; None if it needs a GPU


TRAINERS = {
    "megatron": Trainer(
        "megatron-lm/pretrain_gpt.py",
        MEGATRON_FLAGS,
        "megatron.core.transformer.transformer_layer:TransformerLayer",
        re.compile(r"iteration\s+(\d+)/.*elapsed time per iteration \(ms\): ([\d.]+)"),
        1,
        5,
        logs_on_last_rank=True,
    ),
    "nanogpt": Trainer(
        "nanogpt/train.py",
        NANOGPT_FLAGS,
        "model:Block",
        re.compile(r"^iter (\d+): loss .*time ([\d.]+)ms", re.MULTILINE),
        0,
        1,
        logs_on_last_rank=False,
        cpu_flags=NANOGPT_CPU_FLAGS,
    ),
    # DeepSpeed's example of pipeline parallelism: AlexNet, split where its parameters are.
    "deepspeed": Trainer(
        "deepspeed-pipeline/train.py",
        DEEPSPEED_FLAGS,
        "torch.nn:Linear",
        re.compile(r"^steps: (\d+) loss: .*iter time \(s\): ([\d.]+)", re.MULTILINE),
        1,
        5,
        logs_on_last_rank=False,
        unit_milliseconds=1000.0,
        cpu_flags=DEEPSPEED_CPU_FLAGS,
    ),
}


@dataclass(frozen=True)
class Layout:
    name: str
    flags: str = ""
    ranks: int = 4
    slow_rank: int = 2
    trainer: str = "megatron"
    stand_in: str = ""  # for a package, as in foreign_stand_ins.py

    @property
    def has_stages_of_one_rank(self) -> bool:
        return "pp4" in self.name.split("-")


_TP2_PP2 = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
_PP4 = "--pipeline-model-parallel-size 4 --global-batch-size 32"
LAYOUTS = (
    Layout("dp4", "--use-distributed-optimizer --overlap-grad-reduce"),
    Layout("pp4", _PP4),
    Layout("tp2-pp2", _TP2_PP2),
    Layout("tp4", "--tensor-model-parallel-size 4", slow_rank=1),
    Layout("pp2-dp2", "--pipeline-model-parallel-size 2"),
    Layout("nanogpt", trainer="nanogpt"),
    Layout("tp2-pp2-dp2", _TP2_PP2, ranks=8, slow_rank=5),
    Layout("pp4-interleaved", f"{_PP4} --num-layers-per-virtual-pipeline-stage 1"),
    Layout("tp2-pp2-sp", f"{_TP2_PP2} --sequence-parallel", slow_rank=3, stand_in="apex"),
    Layout(
        "ep2",
        "--num-experts 4 --expert-model-parallel-size 2 --moe-router-topk 2 --moe-token-dispatcher-type alltoall",
        slow_rank=1,
    ),
    Layout("deepspeed-pp2-dp2", "-p 2", trainer="deepspeed", stand_in="torchvision"),
    Layout("deepspeed-pp4", "-p 4", trainer="deepspeed", stand_in="torchvision"),
)


@dataclass(frozen=True)
class Fault:
    name: str
    kind: str  # as in foreign_fault.py
    milliseconds: float = 0.0  # of a layer
    every: int = 1
    more_seconds: float = 0.0  # until the job ends: a verdict on few slow steps needs many of them


FAULTS = (
    Fault("none", "none"),
    Fault("host", "host", 15.0),
    Fault("gpu", "gpu", 10.0),
    Fault("host10", "host", 60.0, 10, more_seconds=60.0),
    Fault("gpu10", "gpu", 60.0, 10, more_seconds=60.0),
)


@dataclass(frozen=True)
class Cell:
    layout: Layout
    fault: Fault

    @property
    def name(self) -> str:
        return f"{self.layout.name}-{self.fault.name}"

    @property
    def is_healthy(self) -> bool:
        return self.fault.kind == "none"

    @property
    def shares(self) -> int:
        """How many shares of the cores the cell takes."""
        return -(-self.layout.ranks // SHARE_RANKS)

    def is_blamed(self, kind: str, culprits: Sequence[int], stage: int | None) -> bool:
        rank = self.layout.slow_rank
        is_stage = kind == "slow_stage" and self.layout.has_stages_of_one_rank and stage in (None, rank)
        return (kind == "slow_rank" or is_stage) and list(culprits) == [rank]


def all_cells() -> list[Cell]:
    """Each layout once with one fault, then each with another: a run that is cut short has seen all layouts."""
    return [
        Cell(layout, FAULTS[(number + turn) % len(FAULTS)])
        for turn in range(len(FAULTS))
        for number, layout in enumerate(LAYOUTS)
    ]


def batches(cells: Sequence[Cell], parallel: int) -> list[list[Cell]]:
    """Cells that run at the same time and take equally long. A large one takes several shares; those that do not fit go
    into the next."""
    made: list[list[Cell]] = []
    for cell in cells:
        equal = (batch for batch in made if batch[0].fault.more_seconds == cell.fault.more_seconds)
        room = (batch for batch in equal if sum(other.shares for other in batch) + cell.shares <= parallel)
        batch = next(room, None)
        if batch is None:
            made.append(batch := [])
        batch.append(cell)
    return made
