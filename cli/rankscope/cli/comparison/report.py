"""The result of `rankscope compare`: a sentence and a table, or a JSON object."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from rankscope.analysis.stats.step_time_comparison import Comparison, Shift, Side
from rankscope.cli.terminal import Terminal

# Below this time a run is too short to compare, however many steps it has.
_ALIKE_STEPS = 5.0


def notes_of(result: Comparison) -> list[str]:
    notes = []
    if result.a.runs == 1 and result.b.runs == 1 and not result.reason:
        notes.append(
            "one run each: this tells the two runs apart, not yet the two versions; processes of the same code may "
            "differ by 10 % (give several runs: --a A1 A2 A3 --b B1 B2 B3)"
        )
    if max(result.a.correlation_steps, result.b.correlation_steps) >= _ALIKE_STEPS:
        steps = max(result.a.correlation_steps, result.b.correlation_steps)
        notes.append(
            f"steps go up and down together: about {steps:.0f} of them count as one; the interval allows for it"
        )
    if result.mean.significant(result.confidence) and not result.significant:
        notes.append(f"the median hides slow steps: by the mean, {_words(result.mean, result.confidence)}")
    return notes


def sentence(result: Comparison) -> str:
    shift = result.median
    if result.reason:
        return f"Too few steps to decide: {_moved(shift)}, but {result.reason}"
    if result.significant:
        return _words(shift, result.confidence)
    return f"No difference found: {_words(shift, result.confidence)}"


def to_json(result: Comparison, names_a: tuple[str, ...], names_b: tuple[str, ...], notes: list[str]) -> dict[str, Any]:
    return {
        **_shift_json(result.median),
        "significant": result.significant,
        "confidence": result.confidence,
        "cliffs_delta": result.cliffs_delta,
        "method": result.method,
        "reason": result.reason or None,
        "sentence": sentence(result),
        "mean": {**_shift_json(result.mean), "significant": result.mean.significant(result.confidence)},
        "a": _side_json(result.a, names_a),
        "b": _side_json(result.b, names_b),
        "notes": notes,
    }


def print_answer(result: Comparison, notes: list[str]) -> None:
    console = Terminal()
    style = ("red" if result.median.difference_ratio > 0 else "green") if result.significant else "yellow"
    console.print(sentence(result), style=f"bold {'yellow' if result.reason else style}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "runs", "steps", "warm-up", "median", "mean", "p90"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, side in (("A", result.a), ("B", result.b)):
        times = (side.median_seconds, side.mean_seconds, side.p90_seconds)
        counts = (f"{side.runs:,}", f"{side.steps:,}", f"{side.warmup_steps:,}")
        table.add_row(name, *counts, *map(_duration, times))
    console.print(table)
    console.print(f"Cliff's delta {result.cliffs_delta:+.2f}: {_overlap(result.cliffs_delta)}", style="dim")
    for note in notes:
        console.print(f"note: {note}", style="dim")


def _words(shift: Shift, confidence: float) -> str:
    low, high = shift.ci_low or 0.0, shift.ci_high or 0.0
    if shift.difference_ratio < 0:
        low, high = -high, -low
    interval = f"{confidence * 100:g} % CI {_percent(low)} – {_percent(high)} %"
    return f"{_moved(shift)} ({interval}), p {_p(shift.p_value or 0.0)}"


def _moved(shift: Shift) -> str:
    if shift.difference_ratio == 0:
        return "B is as fast as A"
    return f"B is {_percent(abs(shift.difference_ratio))} % {'slower' if shift.difference_ratio > 0 else 'faster'}"


def _percent(ratio: float) -> str:
    percent = ratio * 100
    digits = 1 if abs(percent) >= 0.1 or percent == 0 else 3
    return f"{percent:.{digits}f}".replace("-", "−") if abs(percent) < 1e4 else f"{percent:.2g}"


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"= {value:.3f}" if value < 0.1 else f"= {value:.2f}"


def _overlap(delta: float) -> str:
    faster = "faster" if delta < 0 else "slower"
    if abs(delta) < 1e-9:
        return "a step of B is slower than one of A as often as it is faster"
    return f"a step of B is {faster} than one of A in {50 + 50 * abs(delta):.0f} % of pairs"


def _duration(seconds: float) -> str:
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= scale:
            return f"{seconds / scale:,.4g} {unit}"
    return f"{seconds / 1e-9:,.4g} ns"


def _shift_json(shift: Shift) -> dict[str, Any]:
    return {
        "difference_ratio": shift.difference_ratio,
        "ci_low": shift.ci_low,
        "ci_high": shift.ci_high,
        "p_value": shift.p_value,
    }


def _side_json(side: Side, names: tuple[str, ...]) -> dict[str, Any]:
    return {
        "files": list(names),
        "runs": side.runs,
        "steps": side.steps,
        "warmup_steps_dropped": side.warmup_steps,
        "median_seconds": side.median_seconds,
        "mean_seconds": side.mean_seconds,
        "p90_seconds": side.p90_seconds,
        "correlation_steps": side.correlation_steps,
    }
