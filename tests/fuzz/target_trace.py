"""What is made of a trace once it is read: steps, breakdown, stacks of kernels, collectives, summary, diagnosis, the
join with that of a healthy rank, the replay. Damage to the text is `reading`'s."""

from __future__ import annotations

import warnings

import msgspec

from rankscope.analysis.models.device_peaks import find_device
from rankscope.analysis.replay.advice import MAX_LINES, advise
from rankscope.analysis.replay.changes import bucket
from rankscope.analysis.replay.graph import ReplayError
from rankscope.analysis.replay.other_device import predict_on
from rankscope.analysis.replay.prediction import forecast
from rankscope.analysis.replay.step_timeline import StepTimelines
from rankscope.analysis.traces.breakdown import Breakdown, break_down, device_rows
from rankscope.analysis.traces.communication.collectives import Collectives, find_collectives
from rankscope.analysis.traces.cut import find_whole_steps
from rankscope.analysis.traces.diagnosis import diagnose
from rankscope.analysis.traces.joins.join import join_traces, keep_essentials
from rankscope.analysis.traces.kernel_stacks import MAX_DEPTH, kernel_profile
from rankscope.analysis.traces.reader.trace_file import read_trace
from rankscope.analysis.traces.steps import find_steps
from rankscope.analysis.traces.summary import summarize
from rankscope.analysis.traces.trace import Trace
from rankscope.cli.predict_page import make_page
from tests.fuzz.target_reading import CPU_SECONDS, SEEDS, TOKENS, mutator, read

__all__ = ["CPU_SECONDS", "SEEDS", "TOKENS", "mutator"]


def run(data: bytes) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace = read(data, salvage=True)
        if trace is not None and len(trace):
            _check_analysis(trace)


def _check_analysis(trace: Trace) -> None:
    found = _analysed(trace)
    if found is None:
        return
    breakdown, collectives = found
    for parts in (breakdown, *breakdown.steps):
        assert parts.compute_ns + parts.non_compute_ns + parts.idle_ns == parts.span_ns >= 0, parts
        exposed, overlapped = parts.exposed_communication_ns, parts.overlapped_communication_ns
        assert exposed + overlapped == parts.communication_ns, parts
        assert min(parts.compute_ns, parts.non_compute_ns, parts.idle_ns, exposed, overlapped) >= 0, parts
    kernels = kernel_profile(trace)
    assert kernels.samples_total == len(device_rows(trace)) and (kernels.nanos >= 0).all()
    assert all(0 < len(stack) <= MAX_DEPTH for stack in kernels.stacks())
    summary = summarize(trace, breakdown, collectives, rank=trace.rank, file="x", top=5)
    assert len(msgspec.json.encode(summary)) < 4 << 20
    diagnosis = diagnose([summary])
    _check_replay(trace)
    advice = advise({0: trace}, [summary], diagnosis)
    assert all(one.evidence and len(one.lines) <= MAX_LINES for one in advice.advised)
    essence, kept = keep_essentials(trace, collectives)
    _, twin, twin_collectives, twin_breakdown = _twin()
    join_traces({0: twin, 1: essence}, {0: twin_collectives, 1: kept}, breakdowns={0: twin_breakdown, 1: breakdown})


def _check_replay(trace: Trace) -> None:
    try:
        found = forecast({0: trace}, watch=(drawn := StepTimelines()))
    except ReplayError:
        return
    assert found.is_usable or not found.predictions
    assert all(one.step_ns is None or one.step_ns >= 0 for one in found.predictions)
    assert len(make_page(found, "", (), drawn)) < 8 << 20
    gpu = find_device("H200")
    moved = predict_on({0: trace}, {0: gpu}, find_device("L4"), [[bucket(50)]])
    assert all(0 <= (one.low_ns or 0.0) <= (one.other_ns or 0.0) <= (one.high_ns or 0.0) for one in moved.steps)


def _analysed(trace: Trace) -> tuple[Breakdown, Collectives] | None:
    breakdown = break_down(trace)
    find_whole_steps(trace, find_steps(trace), breakdown)
    return None if breakdown is None else (breakdown, find_collectives(trace))


_TWIN: list[tuple[bytes, Trace, Collectives, Breakdown]] = []


def _twin() -> tuple[bytes, Trace, Collectives, Breakdown]:
    """The healthy rank beside it."""
    if not _TWIN:
        trace = read_trace(SEEDS[2])
        found = _analysed(trace)
        assert found is not None
        _TWIN.append((SEEDS[2], *keep_essentials(trace, found[1]), found[0]))
    return _TWIN[0]
