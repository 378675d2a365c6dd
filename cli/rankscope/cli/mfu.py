"""`rankscope mfu`: how much of the devices a training run uses, from numbers or from a model's config."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rankscope.analysis.models.device_peaks import PeakError
from rankscope.analysis.models.mfu import Recompute
from rankscope.analysis.models.model_config import ConfigError
from rankscope.analysis.models.model_shape import Counting
from rankscope.cli.messages import to_stderr, to_stdout
from rankscope.cli.mfu_report.memory import (
    add_measured_arguments,
    add_memory_arguments,
    measure,
    memory_json,
    predict,
    print_memory,
)
from rankscope.cli.mfu_report.output import print_answer, print_peaks, to_json
from rankscope.cli.mfu_report.request import QuantityError, understand

NAME = "mfu"
HELP = "compute MFU and HFU of a model on a device"

_EPILOG = """\
examples:
  rankscope mfu --params 8.03B --layers 32 --width 4096 --sequence 8192 --tokens-per-second 2904 --gpu A100
  rankscope mfu --config config.json --sequence 8192 --step-seconds 4.4 --tokens-per-step 524288 --gpus 64 --gpu H100
  rankscope mfu --flops-per-token 6.1e10 --tokens-per-second 5900 --peak-tflops 989 --recompute full --json
  rankscope mfu --config config.json                      parameters and FLOPs alone
  rankscope mfu --config config.json --sequence 4096 --memory --tp 8 --dp 8 --zero 1
  rankscope mfu --memory-trace trace.json.gz              who held the memory, as a trace measured it
  rankscope mfu --list-gpus                               the peaks it knows

MFU = tokens per second × model FLOPs per token ÷ (GPUs × peak). Model FLOPs per token are 6N + 12·L·H·Q·T (PaLM,
appendix B), where --width is H·Q, heads × head size, and T the sequence length; HFU adds what is computed twice.
With tokens per second of one GPU, leave --gpus at 1. Formulas, JSON keys: docs/mfu.md.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    model = parser.add_argument_group("the model (one of --params, --config, --flops-per-token)")
    model.add_argument("--params", metavar="N", help="parameters, such as 8.03e9 or 8.03B")
    model.add_argument("--layers", metavar="L", help="with --params: layers")
    model.add_argument("--width", metavar="D", help="with --params: attention heads × head size")
    model.add_argument("--sequence", metavar="T", help="tokens of a sequence")
    model.add_argument("--config", type=Path, metavar="FILE", help="Hugging Face style config.json")
    model.add_argument("--flops-per-token", metavar="F", help="declared: forward and backward of a token")
    model.add_argument("--flops-per-step", metavar="F", help="declared: of a step; needs --step-seconds")
    model.add_argument(
        "--counting",
        choices=[counting.value for counting in Counting],
        default="palm",
        help="with --config: palm (default; all active parameters) or matmul (only what is multiplied)",
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
    device.add_argument("--dtype", help="with --gpu: bf16 (default), fp16, tf32, fp8, fp4, int8, fp32, fp64")
    device.add_argument("--list-gpus", action="store_true", help="print the table of peaks")
    add_memory_arguments(parser)
    add_measured_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


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
        return _refuse(str(error))
    except OSError as error:
        return _refuse(f"{error.filename}: {error.strerror}")
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


def _refuse(reason: str) -> int:
    to_stderr(f"error: rankscope mfu: {reason}; next step: rankscope mfu --help")
    return 2
