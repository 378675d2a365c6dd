"""`rankscope mfu --memory`: the memory that a rank needs to train the model of a config, and what a trace measured."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from rankscope.analysis.models.memory_model import OPTIMIZER_BYTES, Spread, StageMemory, Training, predict_memory
from rankscope.analysis.traces.device_memory import MeasuredMemory, measure_memory
from rankscope.cli.messages import refuse, to_stdout
from rankscope.cli.mfu_request import Asked, QuantityError, read_count
from rankscope.cli.terminal import Terminal, make_table

_PARTS = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes", "transient_bytes")
_MAX_STAGES = 4096
_SPLIT = ("before_trace_bytes", "forward_bytes", "backward_bytes", "optimizer_bytes")
_WORDS = ("held before the trace began", "allocated in forward", "in backward", "in the optimizer")


def add_memory_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("memory of a rank (with --model-config and --sequence; --recompute counts, too)")
    group.add_argument("--memory", action="store_true", help="predict it: weights, gradients, optimizer, activations")
    group.add_argument("--micro-batch", default="1", metavar="N", help="sequences per micro-batch (default: 1)")
    group.add_argument("--micro-batches", metavar="N", help="per step and pipeline (default: enough to fill it)")
    group.add_argument("--dp", default="1", metavar="N", help="data-parallel ranks (default: 1)")
    group.add_argument("--tp", default="1", metavar="N", help="tensor-parallel ranks (default: 1)")
    group.add_argument("--pp", default="1", metavar="N", help="pipeline stages, 1F1B (default: 1)")
    group.add_argument("--zero", type=int, choices=(0, 1, 2, 3), default=0, help="ZeRO stage over --dp; FSDP is 3")
    group.add_argument("--sequence-parallel", action="store_true", help="split norms and dropout over --tp too")
    group.add_argument("--optimizer", choices=tuple(OPTIMIZER_BYTES), default="adam", help="default: adam")
    group.add_argument(
        "--precision", choices=("mixed", "fp32"), default="mixed", help="mixed: 16 bits with fp32 copies"
    )
    group.add_argument("--fp32-gradients", action="store_true", help="accumulate gradients in fp32")
    group.add_argument("--eager-attention", action="store_true", help="attention that stores its scores")
    group.add_argument(
        "--memory-trace",
        type=Path,
        metavar="TRACE",
        help="instead: peak, fragmentation and holders of memory in a trace made with profile_memory=True",
    )


def predict(arguments: argparse.Namespace, asked: Asked) -> tuple[StageMemory, ...]:
    if asked.shape is None or asked.sequence is None:
        raise QuantityError("--memory: needs --model-config and --sequence")
    spread = Spread(
        data=read_count("--dp", arguments.dp, "8"),
        tensor=read_count("--tp", arguments.tp, "8"),
        pipeline=read_count("--pp", arguments.pp, "4"),
        zero=arguments.zero,
        sequence_parallel=arguments.sequence_parallel,
    )
    if spread.pipeline > min(len(asked.shape.layers), _MAX_STAGES):
        raise QuantityError(f"--pp: {spread.pipeline} stages for {len(asked.shape.layers)} layers")
    if spread.sequence_parallel and spread.tensor == 1:
        raise QuantityError("--sequence-parallel: splits over --tp, which is 1")
    if spread.zero and spread.data == 1:
        raise QuantityError("--zero: shards over --dp, which is 1")
    weight_bytes = 4 if arguments.precision == "fp32" else 2
    batches = arguments.micro_batches
    training = Training(
        sequence=asked.sequence,
        micro_batch=read_count("--micro-batch", arguments.micro_batch, "1"),
        micro_batches=None if batches is None else read_count("--micro-batches", batches, "8"),
        recompute=asked.recompute,
        flash_attention=not arguments.eager_attention,
        optimizer=arguments.optimizer,
        weight_bytes=weight_bytes,
        gradient_bytes=4 if arguments.fp32_gradients else weight_bytes,
    )
    return predict_memory(asked.shape, spread, training)


def memory_json(stages: tuple[StageMemory, ...]) -> dict[str, Any]:
    rows = [
        {"stage": stage.stage, **{part: getattr(stage, part) for part in _PARTS}, "total_bytes": stage.total_bytes}
        for stage in stages
    ]
    fullest = max(rows, key=lambda row: row["total_bytes"])
    return {"per_gpu": fullest, "stages": rows}


def print_memory(stages: tuple[StageMemory, ...]) -> None:
    console = Terminal()
    fullest = max(stages, key=lambda stage: stage.total_bytes)
    where = f" on stage {fullest.stage}, the fullest" if len(stages) > 1 else ""
    size = _gib(fullest.total_bytes)
    console.print(Text.assemble((f"\nMemory {size} per GPU", "bold"), f"{where}, by calculation"))
    table = make_table(("stage", "weights", "gradients", "optimizer", "activations", "passing", "total"))
    for stage in stages if len(stages) <= 16 else (stages[0], fullest, stages[-1]):
        parts = (getattr(stage, part) for part in _PARTS)
        table.add_row(str(stage.stage), *(_gib(part) for part in parts), _gib(stage.total_bytes))
    console.print(table)
    more = "the allocator's fragmentation, the CUDA context and communication buffers come on top"
    console.print(more, style="dim")


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:,.2f} GiB"


# `--memory-trace`: memory as a torch-profiler trace measured it, beside the prediction of `--memory`.


def measure(path: Path, *, as_json: bool) -> int:
    from rankscope.cli.trace_report.files import load_traces

    loaded = load_traces([path])
    if not loaded.traces:
        broken = loaded.broken[0]
        return refuse_mfu(f"{broken.path}: {broken.reason}")
    measured = []
    for one in loaded.traces:
        found = measure_memory(one.trace)
        # Host allocations beside a device are negligible.
        measured += [(one.path, m) for m in found if m.on_device or not any(other.on_device for other in found)]
    if not measured:
        return refuse_mfu(f"{path}: no allocator events; profile with profile_memory=True")
    if as_json:
        to_stdout(json.dumps({"memory": [{"file": str(file), **asdict(memory)} for file, memory in measured]}))
    else:
        for file, memory in measured:
            _print(file, memory)
    return 0


def _print(path: Path, memory: MeasuredMemory) -> None:
    console = Terminal()
    where = f"GPU {memory.device}" if memory.on_device else "host memory"
    title = f"{path.name}, {where}: peak {_mib(memory.peak_allocated_bytes)} allocated"
    console.print(title, style="bold")
    if memory.peak_reserved_bytes is not None and memory.fragmentation_ratio is not None:
        reserved = _mib(memory.peak_reserved_bytes)
        console.print(f"{reserved} reserved, {memory.fragmentation_ratio:.1%} of it not in use (fragmentation)")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("at the peak", "size", "share", "blocks"):
        table.add_column(name, justify="left" if name == "at the peak" else "right", no_wrap=name != "at the peak")
    peak = max(memory.peak_allocated_bytes, 1)
    for words, name in zip(_WORDS, _SPLIT, strict=True):
        size = getattr(memory, name)
        table.add_row(words, _mib(size), f"{size / peak:.1%}", "")
    table.add_section()
    for holder in memory.holders:
        name = holder.name or "(no operation)"
        table.add_row(f"  {name}", _mib(holder.size_bytes), f"{holder.size_bytes / peak:.1%}", f"{holder.blocks:,}")
    console.print(table)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.1f} MiB"


def refuse_mfu(reason: str) -> int:
    return refuse(f"rankscope mfu: {reason}; next step: rankscope mfu --help")
