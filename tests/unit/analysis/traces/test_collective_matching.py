from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rankscope.analysis.traces.communication.collectives import find_collectives
from rankscope.analysis.traces.joins.channels import gather_calls
from rankscope.analysis.traces.joins.collective_matching import Matched, match_calls
from rankscope.analysis.traces.joins.shift_search import Run, fit_runs
from rankscope.analysis.traces.trace import Category, ProcessGroup, Trace
from tests.unit.analysis.traces.planted_jobs import PlantedJob
from tests.unit.analysis.traces.trace_builder import make_trace

HOUR_US = 3.6e9


def _match(traces: dict[int, Trace]) -> Matched:
    calls = gather_calls(traces, {rank: find_collectives(trace) for rank, trace in traces.items()})
    return match_calls(replace(calls, step=np.full(len(calls), -1)))


def _true_ends(job: PlantedJob, matched: Matched) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Spread of the members' true ends, by collective: small only where the right ones were matched."""
    offset = np.array([job.offsets_us.get(rank, 0.0) * 1000 for rank in range(job.ranks)])
    ends = matched.calls.stop_ns - np.rint(offset).astype(np.int64)[matched.calls.rank]
    spread = [np.ptp(ends[matched.collective == number]) for number in range(matched.count)]
    return np.array(spread, dtype=np.float64)


def test_collectives_match_by_group_and_sequence_not_external_id() -> None:
    def rank(number: int, ids: Sequence[int]) -> Trace:
        note = {"collective": "allreduce", "group": "0", "group_size": 2, "stream": 20}
        kernels = [
            ("ncclDevKernel_AllReduce", Category.KERNEL, 100.0 * i, 50.0, {**note, "sequence": 7 + i, "external_id": e})
            for i, e in enumerate(ids)
        ]
        return make_trace(kernels, rank=number, world_size=2)

    matched = _match({0: rank(0, [1, 2, 3]), 1: rank(1, [3, 1, 2])})
    assert matched.count == 3
    assert np.ptp(matched.calls.sequence.reshape(3, 2), axis=1).tolist() == [0, 0, 0]


def test_groups_of_one_name_on_different_ranks_are_different_groups() -> None:
    job = PlantedJob(4, steps=2, groups=(("tp", ((0, 1), (2, 3))),))
    matched = _match(job.traces())
    assert matched.count == 2 * 2 * 4
    pairs = {tuple(matched.calls.rank[matched.collective == number]) for number in range(matched.count)}
    assert pairs == {(0, 1), (2, 3)}
    # Without the lists, four ranks claim to be in a group of two.
    unlisted = _match(job.but(listed=False).traces())
    assert unlisted.count == 0
    assert "4 ranks use it but it has 2" in unlisted.notes[0]


def test_equal_numbers_of_different_kind_or_size_do_not_match() -> None:
    def rank(number: int, name: str, elements: int) -> Trace:
        note = {"group": "0", "group_size": 2, "sequence": 1, "stream": 20, "element_type": "Float"}
        note |= {"collective": name, "in_elements": elements, "out_elements": elements}
        return make_trace([(f"ncclDevKernel_{name}", Category.KERNEL, 0.0, 10.0, note)], rank=number, world_size=2)

    assert _match({0: rank(0, "allreduce", 8), 1: rank(1, "allreduce", 8)}).count == 1
    assert _match({0: rank(0, "allreduce", 8), 1: rank(1, "allreduce", 9)}).count == 0
    assert _match({0: rank(0, "allreduce", 8), 1: rank(1, "allgather", 8)}).count == 0


def test_captures_beginning_at_different_collectives_are_matched_by_shift() -> None:
    job = PlantedJob(numbered=False, skipped={0: 3, 2: 5}, offsets_us={1: -2 * HOUR_US, 2: HOUR_US, 3: 0.3})
    matched = _match(job.traces())
    assert matched.count == 20
    assert _true_ends(job, matched).max() < 6_000
    members = np.bincount(matched.collective)
    assert members.tolist() == [2] * 3 + [3] * 2 + [4] * 15 or sorted(members.tolist()) == [2] * 3 + [3] * 2 + [4] * 15


def test_an_ambiguous_order_is_reported_and_not_guessed() -> None:
    """Steps as regular as a clock, clocks that say nothing, and no step numbers."""
    regular = [
        ("ncclDevKernel_AllReduce_Sum", Category.KERNEL, 1000.0 * i, 500.0, {"stream": 20, "group": "0"})
        for i in range(9)
    ]
    first = make_trace(regular, rank=0, world_size=2)
    other = make_trace(regular[:-1], rank=1, world_size=2, base_ns=3_600_000_500_000)
    matched = _match({0: first, 1: other})
    assert matched.count == 0
    assert "order is ambiguous" in matched.notes[0]
    # Clocks that agree decide it, and the note says so.
    agreeing = make_trace(regular[:-1], rank=1, world_size=2, base_ns=40_000)
    decided = _match({0: first, 1: agreeing})
    assert decided.count == 8 and "by their clocks" in decided.notes[0]
    assert (np.diff(decided.calls.stop_ns.reshape(-1, 2), axis=1) == 40_000).all()


def test_step_numbers_decide_where_ends_are_too_noisy_to() -> None:
    """Ends as four ranks on two busy cores leave them, in ms: by ends alone, the first three fit the last three."""
    token, step = np.ones(6, dtype=np.int64), np.arange(2, 8)
    left = Run(token, np.array([23_490, 39_680, 46_220, 63_290, 80_000, 84_890]) * 1000, step)
    right = Run(token, np.array([22_270, 32_420, 45_070, 60_970, 77_210, 85_110]) * 1000, step)
    fit = fit_runs(left, right)
    assert fit.found and fit.left.tolist() == fit.right.tolist() == [0, 1, 2, 3, 4, 5]


def test_a_send_matches_its_peers_receive_in_order() -> None:
    """Peers are numbered within their group, (2, 5) here."""
    group = (ProcessGroup("pp", "", (2, 5)),)

    def rank(number: int, kinds: Sequence[str], lead_us: float) -> Trace:
        note = {"group": "pp", "group_size": 2, "stream": 20, "peer": 0 if number == 5 else 1, "element_type": "Float"}
        kernels = [
            (
                "ncclDevKernel_SendRecv(x)",
                Category.KERNEL,
                137.0 * i * i + lead_us,
                60.0 - lead_us,
                {**note, "collective": kind},
            )
            for i, kind in enumerate(kinds)
        ]
        return make_trace(kernels, rank=number, world_size=8, groups=group)

    there, back = ["send", "recv", "send", "send"], ["recv", "send", "recv", "recv"]
    matched = _match({2: rank(2, there, 0.0), 5: rank(5, back, 20.0)})
    assert matched.count == 4
    pairs = [matched.channels[channel].pair for channel in matched.channel.tolist()]
    assert sorted(pairs, key=str) == [(2, 5), (2, 5), (2, 5), (5, 2)]
    assert not matched.together.any()
    assert (np.diff(matched.calls.stop_ns.reshape(-1, 2), axis=1) == 0).all()


def test_ranks_without_collectives_and_groups_of_one_match_nothing() -> None:
    silent = PlantedJob(2, steps=2, silent=(1,))
    assert _match(silent.traces()).count == 0
    alone = PlantedJob(2, steps=2, groups=(("self", ((0,), (1,))),))
    assert _match(alone.traces()).count == 0
