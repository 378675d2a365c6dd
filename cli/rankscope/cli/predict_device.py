"""`rankscope predict --on`: the step on another GPU."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from rankscope.analysis.models.device_peaks import DeviceSpec, PeakError, find_device, known_devices
from rankscope.analysis.quantities import display, number, quantity, shorten
from rankscope.analysis.replay.changes import Change
from rankscope.analysis.replay.other_device import Bound, MovedStep, OtherDevice, predict_on
from rankscope.analysis.traces.summary import device_name
from rankscope.analysis.traces.trace import Trace
from rankscope.cli.messages import CommandError
from rankscope.cli.prediction_text import percent
from rankscope.cli.terminal import Terminal, make_table

_NS_PER_MS, _NS_PER_HOUR = 1e6, 3600e9
_STEPS = 1000  # that costs are given for
_NAME_CHARACTERS = 60
_MAX_PRICE = 1e12
# Closer than this, two steps are equal.
_SAME_RATIO = 0.01
_LIMITS = {
    Bound.COMPUTE: "compute_ratio",
    Bound.MEMORY: "memory_ratio",
    Bound.SMALL: "neither_ratio",
    Bound.UNKNOWN: "unknown_ratio",
    Bound.FIXED: "fixed_ratio",
}


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("another GPU")
    group.add_argument("--on", metavar="GPU", help="predict the step on this GPU (rankscope mfu --list-gpus)")
    group.add_argument(
        "--from", dest="recorded_on", metavar="GPU", help="the GPU of the traces, if they do not name it"
    )
    group.add_argument("--price", type=float, metavar="PER_HOUR", help="price of an hour of the other GPU")
    group.add_argument("--price-now", type=float, metavar="PER_HOUR", help="price of an hour of the GPU of the traces")


def check_device_arguments(arguments: argparse.Namespace) -> DeviceSpec | None:
    """The other GPU; None without --on."""
    for option, price in (("--price", arguments.price), ("--price-now", arguments.price_now)):
        if price is not None and not 0 <= price < _MAX_PRICE:
            raise CommandError(f"{option} {price:g}: not a price; next step: {option} 2.5, for an hour of one GPU")
    if arguments.on is None:
        for option in ("recorded_on", "price", "price_now"):
            if getattr(arguments, option) is not None:
                name = "--from" if option == "recorded_on" else f"--{option.replace('_', '-')}"
                raise CommandError(f"{name} needs the other GPU; next step: --on GPU, as --on {known_devices()[0]!r}")
        return None
    if arguments.html is not None:
        raise CommandError("--html shows changes, not another GPU; next step: leave --on or --html out")
    return _device("--on", arguments.on)


def move(
    arguments: argparse.Namespace,
    traces: Mapping[int, Trace],
    other: DeviceSpec,
    changes: Sequence[Sequence[Change]] | None,
    step_ns: float | None,
) -> OtherDevice:
    """Raises ReplayError."""
    if arguments.recorded_on is not None:
        said = _device("--from", arguments.recorded_on)
        return predict_on(traces, dict.fromkeys(traces, said), other, changes or (), step_ns)
    now = {rank: _recorded(rank, device_name(trace)) for rank, trace in traces.items()}
    return predict_on(traces, now, other, changes or (), step_ns)


def _device(option: str, name: str) -> DeviceSpec:
    try:
        return find_device(name)
    except PeakError as error:
        raise CommandError(f"{option}: {error}; next step: {option} with a name of this list") from None


def _recorded(rank: int, name: str) -> DeviceSpec:
    try:
        return find_device(name)
    except PeakError:
        reason = f"ran on {shorten(name, _NAME_CHARACTERS)!r}, whose peaks are not known" if name else "names no GPU"
        known = ", ".join(known_devices())
        raise CommandError(f"the trace of rank {rank} {reason}; next step: --from GPU, one of {known}") from None


def device_headline(moved: OtherDevice) -> str:
    step = moved.steps[0]
    now, there = step.now_ns or 0.0, step.other_ns or 0.0
    unit = display("us", (there / 1000,))
    low, high = (number((one or 0.0) / 1000 / unit.factor) for one in (step.low_ns, step.high_ns))
    took = f"On {moved.other.name} a step would take {_step(there)} ({low} to {high})"
    here = f"{_step(now)} on {_names(moved)}"
    ratio = there / now if now > 0 else 1.0
    if abs(ratio - 1) < _SAME_RATIO:
        return f"{took}, as long as {here}."
    return f"{took}, {ratio:.2f} times the {here}."


def print_device(moved: OtherDevice, price: float | None, price_now: float | None, console: Terminal) -> None:
    if len(moved.steps) > 1:
        columns = ("change", _names(moved), moved.other.name, "low", "high")
        table = make_table(columns, left=("change",))
        for one in moved.steps:
            if one.other_ns is not None:
                steps = (one.now_ns, one.other_ns, one.low_ns, one.high_ns)
                table.add_row(*map(Text, (one.name or "none", *map(_step, steps))))
        console.print(table)
        for one in moved.steps:
            if one.other_ns is None:
                console.print(Text(f"{one.name}: {one.reason}", style="dim"))
        console.print()
    if moved.peak_memory_bytes is not None:
        verb = "fits" if moved.fits else "does not fit"
        line = f"peak memory of {moved.peak_memory_bytes / 1e9:,.1f} GB {verb} into {moved.other.memory_gb:g} GB"
        console.print(Text(line, style="" if moved.fits else "bold red"))
    for line in (*_costs(moved, price, price_now), *_utilisation(moved)):
        console.print(Text(line))
    console.print(Text(_kernels(moved)))
    console.print(Text("the host's time, communication, and copies from and to the host stay as they are", style="dim"))
    for note in moved.notes:
        console.print(Text(f"note: {note}", style="dim"))


def _kernels(moved: OtherDevice) -> str:
    ratio = {bound: percent(moved.time_ratios.get(bound, 0.0)) for bound in Bound}
    return (
        f"time on the GPU: {ratio[Bound.COMPUTE]} limited by compute, {ratio[Bound.MEMORY]} by memory, "
        f"{ratio[Bound.SMALL]} by neither, {ratio[Bound.UNKNOWN]} unknown, {ratio[Bound.FIXED]} stays"
    )


def _utilisation(moved: OtherDevice) -> list[str]:
    step, now = moved.steps[0], moved.now[0]
    here, there = moved.mfu_ratio(step.now_ns, now), moved.mfu_ratio(step.other_ns, moved.other)
    lines = []
    if here is not None and there is not None:
        there_too = f"{percent(there)} on {moved.other.name}"
        lines.append(f"MFU {percent(here)} on {now.name}, {there_too} ({moved.number_format})")
    elif moved.flops_per_step is None:
        lines.append("MFU is not known: the traces have no shapes (record_shapes=True)")
    rates = []
    if moved.achieved_tflops is not None:
        rates.append(f"dense kernels reach {moved.achieved_tflops:,.1f} TFLOP/s ({moved.number_format})")
    if moved.achieved_gb_per_second is not None:
        rates.append(f"kernels limited by memory reach {moved.achieved_gb_per_second:,.0f} GB/s")
    return [*lines, "; ".join(rates)] if rates else lines


def _costs(moved: OtherDevice, price: float | None, price_now: float | None) -> list[str]:
    step, costs = moved.steps[0], []
    if price_now is not None:
        costs.append(f"{_money(_cost(moved, step.now_ns, price_now))} on {_names(moved)}")
    if price is not None:
        low, there, high = (_cost(moved, one, price) for one in (step.low_ns, step.other_ns, step.high_ns))
        costs.append(f"{_money(there)} on {moved.other.name} ({_money(low)} to {_money(high)})")
    gpus = "1 GPU" if moved.gpus == 1 else f"{moved.gpus:,} GPUs"
    return [f"{_STEPS:,} steps on {gpus} cost {', '.join(costs)}"] if costs else []


def _cost(moved: OtherDevice, step_ns: float | None, price: float | None) -> float | None:
    """Of 1,000 steps on all GPUs of the job."""
    return None if step_ns is None or price is None else _STEPS * moved.gpus * price * step_ns / _NS_PER_HOUR


def _money(cost: float | None) -> str:
    return f"{cost or 0.0:,.3g}" if (cost or 0.0) < 100 else f"{cost:,.0f}"


def _names(moved: OtherDevice) -> str:
    return " and ".join(spec.name for spec in moved.now)


def _step(step_ns: float | None) -> str:
    return quantity((step_ns or 0.0) / 1000, "us")


def device_json(moved: OtherDevice, price: float | None, price_now: float | None) -> dict[str, Any]:
    """The keys are documented in docs/predict.md."""
    first = moved.steps[0] if moved.steps else MovedStep((), None, None, None, None)
    return {
        "gpu": moved.other.name,
        "from_gpus": [spec.name for spec in moved.now],
        "gpus": moved.gpus,
        "steps": [_step_json(moved, one, price, price_now) for one in moved.steps],
        "time_ratios": {key: moved.time_ratios.get(bound, 0.0) for bound, key in _LIMITS.items()},
        "number_format": moved.number_format,
        "flops_per_step": moved.flops_per_step,
        "achieved_tflops": moved.achieved_tflops,
        "achieved_gb_per_second": moved.achieved_gb_per_second,
        "mfu_ratio": moved.mfu_ratio(first.now_ns, moved.now[0]),
        "other_mfu_ratio": moved.mfu_ratio(first.other_ns, moved.other),
        "peak_memory_bytes": moved.peak_memory_bytes,
        "memory_gb": moved.other.memory_gb,
        "fits": moved.fits,
        "notes": list(moved.notes),
    }


def _step_json(moved: OtherDevice, one: MovedStep, price: float | None, price_now: float | None) -> dict[str, Any]:
    def milliseconds(step_ns: float | None) -> float | None:
        return None if step_ns is None else step_ns / _NS_PER_MS

    return {
        "changes": [change.name for change in one.changes],
        "reason": one.reason,
        "step_ms": milliseconds(one.now_ns),
        "other_step_ms": milliseconds(one.other_ns),
        "low_step_ms": milliseconds(one.low_ns),
        "high_step_ms": milliseconds(one.high_ns),
        "cost_per_1000_steps": _cost(moved, one.now_ns, price_now),
        "other_cost_per_1000_steps": _cost(moved, one.other_ns, price),
    }
