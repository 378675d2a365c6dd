"""The result of `rankscope mfu`: sentences and tables, or a JSON object."""

from __future__ import annotations

import json
import math
from typing import Any

from rich.table import Table
from rich.text import Text

from rankscope.analysis.models.device_peaks import DTYPES, known_devices, peaks_of
from rankscope.analysis.models.mfu import Recompute
from rankscope.cli.messages import to_stdout
from rankscope.cli.mfu_report.request import Asked
from rankscope.cli.terminal import Terminal

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
        to_stdout(json.dumps({"unit": "TFLOP/s dense", "gpus": {name: peaks_of(name) for name in known_devices()}}))
        return
    table = Table(box=None, pad_edge=False, header_style="bold", title="dense peak of one GPU, TFLOP/s (int8: TOP/s)")
    table.add_column("GPU", no_wrap=True)
    for dtype in DTYPES:
        table.add_column(dtype, justify="right", no_wrap=True)
    for name in known_devices():
        table.add_row(name, *(f"{value:g}" if value is not None else "–" for value in peaks_of(name).values()))
    Terminal().print(table)


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count:,} GPUs"
