"""`rankscope mfu`: how much of the devices a training run uses, from numbers or from a model's config."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from rankscope.analysis.models.device_peaks import DTYPES, PeakError, known_devices, memory_of, peaks_of
from rankscope.analysis.models.mfu import Recompute
from rankscope.analysis.models.model_config import ConfigError
from rankscope.analysis.models.model_shape import Counting
from rankscope.cli.messages import cannot_read, to_stdout
from rankscope.cli.mfu_memory import (
    add_memory_arguments,
    measure,
    memory_json,
    predict,
    print_memory,
    refuse_mfu,
)
from rankscope.cli.mfu_request import Asked, QuantityError, understand
from rankscope.cli.options import add_options
from rankscope.cli.terminal import Terminal, make_table

_EPILOG = """\
examples:
  rankscope mfu --params 8.03B --layers 32 --width 4096 --sequence 8192 --tokens-per-second 2904 --gpu A100
  rankscope mfu --model-config config.json --sequence 8192 --step-seconds 4.4 --tokens-per-step 524288 --gpus 64 \\
    --gpu H100
  rankscope mfu --flops-per-token 6.1e10 --tokens-per-second 5900 --peak-tflops 989 --recompute full --json
  rankscope mfu --model-config config.json                      parameters and FLOPs alone
  rankscope mfu --model-config config.json --sequence 4096 --memory --tp 8 --dp 8 --zero 1
  rankscope mfu --memory-trace trace.json.gz              who held the memory, as a trace measured it
  rankscope mfu --list-gpus                               the peaks it knows

MFU = tokens per second × model FLOPs per token ÷ (GPUs × peak). Model FLOPs per token are 6N + 12·L·H·Q·T (PaLM,
appendix B), where --width is H·Q, heads × head size, and T the sequence length; HFU adds what is computed twice.
With tokens per second of one GPU, leave --gpus at 1. Formulas, JSON keys: docs/mfu.md.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    model = parser.add_argument_group("the model (one of --params, --model-config, --flops-per-token)")
    model.add_argument("--params", metavar="N", help="parameters, such as 8.03e9 or 8.03B")
    model.add_argument("--layers", metavar="L", help="with --params: layers")
    model.add_argument("--width", metavar="D", help="with --params: attention heads × head size")
    model.add_argument("--sequence", metavar="T", help="tokens of a sequence")
    model.add_argument("--model-config", type=Path, metavar="FILE", help="Hugging Face style config.json")
    model.add_argument("--flops-per-token", metavar="F", help="declared: forward and backward of a token")
    model.add_argument("--flops-per-step", metavar="F", help="declared: of a step; needs --step-seconds")
    model.add_argument(
        "--counting",
        choices=[counting.value for counting in Counting],
        default="palm",
        help="with --model-config: palm (default; all active parameters) or matmul (only what is multiplied)",
    )
    model.add_argument("--causal", action="store_true", help="count half of the attention, as a causal mask leaves it")
    model.add_argument(
        "--recompute",
        choices=[recompute.value for recompute in Recompute],
        default="none",
        help="for HFU: full repeats the forward pass of layers, selective the attention alone (default: none)",
    )
    speed = parser.add_argument_group("how fast it runs")
    speed.add_argument("--tokens-per-second", metavar="X", help="of all --gpus together")
    speed.add_argument("--step-seconds", metavar="S", help="or: time of a step, with --tokens-per-step")
    speed.add_argument("--tokens-per-step", metavar="B", help="tokens of a step over all --gpus")
    device = parser.add_argument_group("on what")
    device.add_argument("--gpus", default="1", metavar="G", help="how many (default: 1)")
    which = device.add_mutually_exclusive_group()
    which.add_argument("--gpu", metavar="NAME", help="such as H100, 'H100 PCIe', A100, MI300X")
    which.add_argument("--peak-tflops", metavar="P", help="dense peak of one GPU in TFLOP/s")
    device.add_argument("--dtype", choices=DTYPES, help="with --gpu: number format of the run (default: bf16)")
    device.add_argument("--list-gpus", action="store_true", help="print the table of peaks")
    add_memory_arguments(parser)
    add_options(parser, "--json")


def run(arguments: argparse.Namespace) -> int:
    if arguments.list_gpus:
        print_peaks(as_json=arguments.json)
        return 0
    if arguments.memory_trace is not None:
        return measure(arguments.memory_trace, as_json=arguments.json)
    try:
        asked = understand(arguments)
        stages = predict(arguments, asked) if arguments.memory else None
    except (QuantityError, PeakError, ConfigError) as error:
        return refuse_mfu(str(error))
    except OSError as error:
        return refuse_mfu(f"{error.filename}: {cannot_read(error)}")
    if arguments.json:
        answer = to_json(asked)
        if stages is not None:
            answer["memory"] = memory_json(stages)
        to_stdout(json.dumps(answer))
        return 0
    print_answer(asked)
    if stages is not None:
        print_memory(stages)
    return 0


# The answer: sentences and tables, or a JSON object.


_REPEATED = {
    Recompute.NONE: "nothing recomputed",
    Recompute.SELECTIVE: "attention recomputed",
    Recompute.FULL: "layers recomputed",
}


def warnings_of(asked: Asked) -> list[str]:
    if asked.used is None or asked.used.possible:
        return []
    which = "MFU" if asked.used.mfu_ratio > 1 else "HFU"
    return [
        f"{which} above 100 % is impossible: an input must be wrong (tokens per second of all GPUs with --gpus 1? "
        "a sparse speed, or another number format than the run's?)"
    ]


def notes_of(asked: Asked) -> list[str]:
    notes = [asked.peak.note] if asked.peak is not None and asked.peak.note else []
    return notes + list(asked.shape.notes if asked.shape is not None else ())


def to_json(asked: Asked) -> dict[str, Any]:
    flops, used, peak, shape = asked.flops, asked.used, asked.peak, asked.shape
    answer = {
        "mfu_ratio": used.mfu_ratio if used else None,
        "hfu_ratio": used.hfu_ratio if used else None,
        "model_flops_per_token": flops.model if flops else None,
        "hardware_flops_per_token": flops.hardware(asked.recompute) if flops else None,
        "attention_flops_per_token": flops.attention if flops else None,
        "tokens_per_second": asked.tokens_per_second,
        "gpus": asked.gpus,
        "gpu": peak.device or None if peak else None,
        "dtype": peak.dtype or None if peak else None,
        "peak_flops_per_second": peak.flops_per_second if peak else None,
        "model_flops_per_second": used.model_flops_per_second if used else None,
        "model_flops_per_second_per_gpu": used.flops_per_second_per_gpu if used else None,
        "parameters": shape.parameters if shape else asked.parameters,
        "active_parameters": shape.active_parameters if shape else asked.parameters,
        "family": shape.family if shape else None,
        "sequence": asked.sequence,
        "counting": asked.counting.value if asked.counting else "declared",
        "causal": asked.causal,
        "recompute": asked.recompute.value,
        "warnings": warnings_of(asked),
        "notes": notes_of(asked),
    }
    # JSON has no infinity; an overflow was not measured.
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in answer.items()
    }


def print_answer(asked: Asked) -> None:
    console = Terminal()
    used, flops, shape = asked.used, asked.flops, asked.shape
    if used is not None:
        achieved = used.flops_per_second_per_gpu / 1e12
        peak = f"{asked.peak.tflops:g} TFLOP/s" if asked.peak else ""
        name = f"{asked.peak.device} {asked.peak.dtype}" if asked.peak and asked.peak.device else "given"
        rate = f": {achieved:,.4g} of {peak} per GPU ({name}), {_gpus(asked.gpus)}"
        console.print(Text.assemble((f"MFU {used.mfu_ratio:.1%}", "bold"), rate))
        if used.hfu_ratio is not None and asked.recompute is not Recompute.NONE:
            again = f": {_REPEATED[asked.recompute]}"
            console.print(Text.assemble((f"HFU {used.hfu_ratio:.1%}", "bold"), again))
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    if shape is not None:
        table.add_row("model", f"{shape.family}, {len(shape.layers)} layers of width {shape.width:,}")
        table.add_row("parameters", f"{shape.parameters:,}")
        if shape.active_parameters != shape.parameters:
            table.add_row("active per token", f"{shape.active_parameters:,}")
    if flops is not None:
        how = "declared" if asked.counting is None else asked.counting.value + (", causal" if asked.causal else "")
        table.add_row(f"model FLOPs per token ({how})", f"{flops.model:.5g}")
        if flops.attention:
            table.add_row("of which attention", f"{flops.attention / flops.model:.1%}")
    if asked.tokens_per_second is not None:
        table.add_row("tokens per second", f"{asked.tokens_per_second:,.6g}")
    if table.row_count:
        console.print(table)
    for note in notes_of(asked):
        console.print(f"note: {note}", style="dim")
    if used is None and flops is not None:
        wanted = "for MFU give --tokens-per-second (or --step-seconds, --tokens-per-step) and --gpu"
        console.print(wanted, style="dim")
    for warning in warnings_of(asked):
        console.print(Text.assemble(("warning:", "bold red"), f" {warning}"))


def print_peaks(*, as_json: bool) -> None:
    if as_json:
        names = known_devices()
        memory = {name: dict(zip(("gb_per_second", "gb"), memory_of(name), strict=True)) for name in names}
        to_stdout(
            json.dumps({"unit": "TFLOP/s dense", "gpus": {name: peaks_of(name) for name in names}, "memory": memory})
        )
        return
    title = "dense peak of one GPU, TFLOP/s (int8: TOP/s), and its memory"
    table = make_table(("GPU", *DTYPES, "GB/s", "GB"), ("GPU",), title=title)
    for name in known_devices():
        values = (*peaks_of(name).values(), *memory_of(name))
        table.add_row(name, *(f"{value:g}" if value is not None else "–" for value in values))
    Terminal().print(table)


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count:,} GPUs"
