"""A forecast in words, for the terminal and for pages."""

from __future__ import annotations

from rankscope.analysis.quantities import count, quantity, shorten
from rankscope.analysis.replay.prediction import MAX_ERROR_RATIO, MIN_HOST_FACTOR, Forecast, Prediction, gain_words

# Names of kernels can be thousands of characters long.
_NAME_CHARACTERS = 76


def gain_unit(one: Prediction) -> str:
    """Steps of other batches are compared by their samples."""
    return "per sample" if one.alters_training else ""


def not_applicable(found: Forecast) -> dict[str, str]:
    """The names of changes that do not apply, by reason."""
    names: dict[str, list[str]] = {}
    for one in found.predictions:
        if one.gain_ratio is None:
            names.setdefault(one.reason, []).append(one.name)
    return {reason: ", ".join(some) for reason, some in names.items()}


def headline(found: Forecast) -> str:
    if not found.is_usable:
        return "Cannot be predicted."
    best = found.best
    if best is None:
        return "None of these changes would shorten the step."
    what = " and ".join(change.what for change in best.changes)
    return f"{gain_words(best)} of the step would be saved if {what}."


def facts(found: Forecast, ranks: int, step_ms: float | None) -> list[str]:
    """What was recorded, and how well it replays."""
    error = percent(abs(found.error_ratio))
    recorded = f"a step of {quantity(found.recorded_step_ns / 1000, 'us')} was recorded on {count(ranks, 'rank')}"
    if not found.is_usable:
        return [
            f"{recorded}; the replay differs by {error}, more than {percent(MAX_ERROR_RATIO)}.",
            f"It drifts apart before {shorten(found.diverges_at, _NAME_CHARACTERS)}.",
        ]
    return [f"{recorded}; the replay differs by {error}", _host_line(found, step_ms)]


def _host_line(found: Forecast, step_ms: float | None) -> str:
    if found.host_factor is not None:
        return f"without the profiler the host takes {percent(found.host_factor)} of its recorded time"
    if found.on_host:
        known = "sleeping, reading and communication take the step's time" if step_ms else "--step-ms MS corrects it"
        return f"host time as recorded, slowed by the profiler; {known}"
    why = "the step does not depend on it" if step_ms is not None else "give --step-ms MS for one gain"
    least = f"{100 * MIN_HOST_FACTOR:.0f} to 100 %"
    return f"without the profiler the host takes {least} of its recorded time; {why}"


def percent(ratio: float) -> str:
    return f"{100 * ratio:.1f} %"
