"""`rankscope batch`: step time, throughput and memory at other batch sizes, from two or more that were measured."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.text import Text

from rankscope.analysis.models.batch_size import (
    MAX_ERROR_RATIO,
    SATURATED_GAIN_RATIO,
    Answers,
    BatchError,
    BatchModel,
    Check,
    Line,
    Point,
    answer,
    fit,
)
from rankscope.analysis.quantities import number, quantity, shorten
from rankscope.analysis.traces.summary_records import RankSummary
from rankscope.cli.messages import CommandError, Exit, to_stderr, to_stdout
from rankscope.cli.options import add_options
from rankscope.cli.prediction_text import percent
from rankscope.cli.terminal import Terminal, make_table
from rankscope.cli.trace_report.reduction import reduce_files

_EPILOG = """\
examples:
  rankscope batch 8=b8.json.gz 16=b16.json.gz                       two traces: predict other batches
  rankscope batch 8=b8.json.gz 16=b16.json.gz 32=b32.json.gz        a third tells how far the model is off
  rankscope batch 8=b8.json.gz,14.7ms 16=b16.json.gz,15.1ms         with the steps without the profiler
  rankscope batch 8=134ms,5.8GiB 16=245ms,8.9GiB --memory-gb 80     without traces, for a device of 80 GB

A batch is the number of samples that one rank processes in a step. Memory needs traces with profile_memory=True. The
profiler slows the host: a job that is bound by launches needs its steps without the profiler, as above.
What the model assumes: docs/batch.md.
"""
_EXAMPLE = "rankscope batch 8=b8.json.gz 16=b16.json.gz, or 8=134ms,5.8GiB"
_MICROSECONDS = {"us": 1.0, "µs": 1.0, "ms": 1e3, "s": 1e6}
_BYTES = {"B": 1.0, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_BYTES |= {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}
_NUMBER = r"\s*([0-9]{1,15}(?:\.[0-9]{0,15})?(?:e[+-]?[0-9]{1,2})?)\s*"
_TIME = re.compile(f"{_NUMBER}({'|'.join(_MICROSECONDS)})\\s*")
_SIZE = re.compile(f"{_NUMBER}({'|'.join(_BYTES)})\\s*")
_MAX_DIGITS = 10
# A larger share of the step is worth a warning.
_INPUT_RATIO = 0.05
_SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class _Measured:
    point: Point
    device_bytes: float | None
    is_of_profiler: bool  # its step was slowed by the profiler
    input_ratio: float | None  # of the step, in which the device waits for input


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument(
        "points",
        nargs="+",
        metavar="BATCH=TRACE|STEP[,…]",
        help="a batch and its trace (or the directory of all ranks), its step (14.7ms), its peak memory (12.3GiB)",
    )
    parser.add_argument(
        "--memory-gb", type=float, metavar="GB", help="memory of the device, in 10⁹ bytes (default: from the traces)"
    )
    add_options(parser, "--json")


def run(arguments: argparse.Namespace) -> int:
    given = arguments.memory_gb
    if given is not None and not 0 < given < float("inf"):
        raise CommandError(f"--memory-gb {given:g}: a device has more than nothing; next step: --memory-gb 80")
    measured = [_measure(text) for text in arguments.points]
    try:
        model = fit([one.point for one in measured])
    except BatchError as error:
        raise CommandError(str(error)) from None
    device_bytes = _least(one.device_bytes for one in measured) if given is None else given * 1e9
    found = answer(model, device_bytes)
    warnings = _warnings(model, found, measured)
    if arguments.json:
        to_stdout(json.dumps(to_json(model, found, warnings), allow_nan=False))
    else:
        print_answers(model, found, warnings)
    return Exit.OK if model.holds else Exit.UNDECIDED


def _measure(text: str) -> _Measured:
    batch, equals, rest = text.partition("=")
    words = batch.strip()
    if not equals or not (words.isascii() and words.isdigit() and len(words) <= _MAX_DIGITS):
        shown = shorten(text, _SHOWN_CHARACTERS)
        raise CommandError(f"{shown}: no batch and what was measured of it; next step: {_EXAMPLE}")
    parts = rest.split(",")
    step_us = memory_bytes = None
    # From the end: a path may have commas.
    while parts and (found := _TIME.fullmatch(parts[-1]) or _SIZE.fullmatch(parts[-1])):
        if found[2] in _MICROSECONDS:
            step_us = float(found[1]) * _MICROSECONDS[found[2]]
        else:
            memory_bytes = float(found[1]) * _BYTES[found[2]]
        parts.pop()
    path = ",".join(parts)
    if path:
        return _of_trace(int(words), path, step_us, memory_bytes)
    if step_us is None:
        raise CommandError(f"batch {words}: neither a trace nor a step; next step: {_EXAMPLE}")
    return _Measured(Point(int(words), step_us, None, memory_bytes), None, False, None)


def _of_trace(batch: int, path: str, step_us: float | None, memory_bytes: float | None) -> _Measured:
    """The median rank's times; the fullest rank's memory."""
    files = reduce_files([path], top=1)
    for one in files.broken:
        to_stderr(f"warning: {one.path}: {one.reason}")
    ranks = [one.summary for one in files.ranks if one.summary.step_us]
    if not ranks:
        hint = "name a trace of whole steps, as rankscope capture --steps 5 records it"
        raise CommandError(f"batch {batch}: {shorten(path, _SHOWN_CHARACTERS)} has no step; next step: {hint}")
    device = [busy for rank in ranks if (busy := _device_us(rank)) is not None]
    recorded = float(np.median([np.median(rank.step_times_us) for rank in ranks]))
    memory = [rank.memory for rank in ranks]
    point = Point(
        batch=batch,
        step_us=recorded if step_us is None else step_us,
        # A step that was measured elsewhere can be a little shorter than the device's time in the trace.
        device_us=float(np.median(device)) if device else None,
        memory_bytes=memory_bytes or _most(one.peak_allocated_bytes for one in memory),
    )
    return _Measured(
        point=point,
        device_bytes=_least(one.device_bytes for one in memory),
        is_of_profiler=step_us is None,
        input_ratio=max((rank.idle.input_wait_us / rank.span_us for rank in ranks if rank.span_us > 0), default=None),
    )


def _device_us(rank: RankSummary) -> float | None:
    """Of a step, in which the device works."""
    whole = [step.duration_us - step.idle_us for step in rank.whole_steps]
    busy = float(np.median(whole)) if whole and not rank.on_host else 0.0
    return busy if busy > 0 else None


def _least(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _most(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _warnings(model: BatchModel, found: Answers, measured: list[_Measured]) -> list[str]:
    said = []
    for what, check in (("step", model.step_check), ("memory", model.memory_check)):
        if check is not None and not check.holds:
            error, limit = percent(check.error_ratio), percent(MAX_ERROR_RATIO)
            said.append(
                f"the model of the {what} does not hold: from the other batches, that of batch {check.batch} is off by "
                f"{error}, more than {limit}"
            )
    if not model.step.grows:
        batches = f"batch {model.points[0].batch} to {model.points[-1].batch}"
        said.append(
            f"the step does not grow from {batches}: something else than the device bounds it; measure a larger batch"
        )
    elif model.step.fixed < 0:
        said.append("a sample takes longer in a larger batch; steps beyond the measured ones may be too short")
    slowed = [one.point for one in measured if one.is_of_profiler and one.point.is_host_bound]
    if slowed:
        said.append(
            f"the host bounds the step of batch {slowed[0].batch}, and the profiler slowed it; "
            f"{slowed[0].batch}=TRACE,14.7ms gives the step without"
        )
    elif model.host_us is not None and model.host_us[1] > (1 + MAX_ERROR_RATIO) * model.host_us[0]:
        shortest, longest = (quantity(value, "us") for value in model.host_us)
        said.append(f"the host takes {shortest} to {longest}, so the steps that it bounds are as uncertain")
    waits = [one.point.batch for one in measured if (one.input_ratio or 0.0) > _INPUT_RATIO]
    if waits:
        said.append(f"batch {waits[0]} waits for its input, which the model takes for a time that does not grow")
    if model.memory is None:
        is_missing = any(point.memory_bytes is None for point in model.points)
        hint = "; record with profile_memory=True, or give it: 8=14.7ms,12.3GiB" if is_missing else ""
        said.append(f"{model.memory_reason}{hint}")
    elif found.device_bytes is None:
        said.append("the memory of the device is not known; --memory-gb 80 gives it")
    return said


def print_answers(model: BatchModel, found: Answers, warnings: list[str]) -> None:
    console = Terminal(soft_wrap=True)
    console.print(Text(_headline(model, found), style="bold" if model.holds else "bold red"))
    for line in _facts(model, found):
        console.print(Text(line, style="dim"))
    console.print()
    if found.rows:
        measured = {point.batch: point for point in model.points}
        table = make_table(("batch", "step", "measured", "samples/s", "gain", "memory", "measured"))
        for row in found.rows:
            cells = (
                f"{row.batch:,}",
                quantity(row.step_us, "us"),
                quantity(point.step_us, "us") if (point := measured.get(row.batch)) else "",
                number(row.samples_per_second),
                "" if row.gain_ratio is None else percent(row.gain_ratio),
                quantity(row.memory_bytes, "B"),
                quantity(point.memory_bytes, "B") if point else "",
            )
            table.add_row(*map(Text, cells))
        console.print(table)
        console.print()
    for warning in warnings:
        console.print(Text(f"note: {warning}", style="yellow"))


def _headline(model: BatchModel, found: Answers) -> str:
    if not model.holds:
        return "The model does not hold for these batches."
    if found.largest_batch is not None and found.largest_batch < model.points[0].batch:
        return f"Batch {model.points[0].batch:,}, the smallest that was measured, does not fit with the margin."
    if found.best_batch is None or found.saturated_at is None:
        return f"A larger batch costs no time up to {model.points[-1].batch:,}."
    smallest = model.points[0].batch
    if found.best_batch == smallest:
        return f"Batch {smallest:,}, the smallest measured, is large enough: doubling brings less than {_limit()}."
    factor = model.samples_per_second(found.best_batch) / model.samples_per_second(smallest)
    more = f"{percent(factor - 1)} more throughput than" if factor < 2 else f"{factor:.1f} times the throughput of"
    words = f"Batch {found.best_batch:,} has {more} {smallest:,}"
    if found.best_batch >= found.saturated_at:
        return f"{words}; beyond, doubling brings less than {_limit()}."
    return f"{words}; it is the last doubling that fits."


def _limit() -> str:
    return f"{100 * SATURATED_GAIN_RATIO:.0f} %"


def _facts(model: BatchModel, found: Answers) -> Iterable[str]:
    step = model.step
    if step.grows:
        fixed, each = quantity(step.fixed, "us"), quantity(step.per_sample, "us")
        yield f"step: {fixed} and {each} per sample{_floor(step, 'us')}{_checked(model.step_check)}"
    if found.host_bound_below is not None:
        yield f"below batch {found.host_bound_below:,} the host bounds the step"
    if model.memory is not None:
        fixed, each = quantity(model.memory.fixed, "B"), quantity(model.memory.per_sample, "B")
        yield f"memory: {fixed} and {each} per sample{_floor(model.memory, 'B')}{_checked(model.memory_check)}"
    if found.largest_batch is not None:
        usable, device = quantity(found.usable_bytes, "B"), quantity(found.device_bytes, "B")
        power = f"; as a power of two {found.largest_power_of_two:,}" if found.largest_power_of_two else ""
        yield f"largest batch that fits into {usable} of {device}: {found.largest_batch:,}{power}"


def _floor(line: Line, unit: str) -> str:
    return "" if line.floor is None else f", at least {quantity(line.floor, unit)}"


def _checked(check: Check | None) -> str:
    if check is None:
        return "; not checked, which takes one more batch"
    return f"; from the other batches, each is predicted within {percent(check.error_ratio)}"


def to_json(model: BatchModel, found: Answers, warnings: list[str]) -> dict[str, Any]:
    """The keys are documented in docs/batch.md."""
    return {
        "holds": model.holds,
        "points": [asdict(point) for point in model.points],
        "step": _line_json(model.step, model.step_check, "us"),
        "memory": None if model.memory is None else _line_json(model.memory, model.memory_check, "bytes"),
        **asdict(found),
        "warnings": warnings,
    }


def _line_json(line: Line, check: Check | None, unit: str) -> dict[str, float | int | None]:
    return {
        f"fixed_{unit}": line.fixed,
        f"per_sample_{unit}": line.per_sample,
        f"floor_{unit}": line.floor,
        "error_ratio": None if check is None or not math.isfinite(check.error_ratio) else check.error_ratio,
        "worst_batch": None if check is None else check.batch,
    }
