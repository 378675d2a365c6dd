"""The operations of a job's traces in the steps that ranks have in common, for the graph of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from rankscope.analysis.stats.robust import take_rows
from rankscope.analysis.step_graph.clock_alignment import Clocks
from rankscope.analysis.step_graph.operations import Operations, since_issued
from rankscope.analysis.traces.communication.collectives import Collectives
from rankscope.analysis.traces.joins.channels import called_ns
from rankscope.analysis.traces.joins.collective_matching import Matched
from rankscope.analysis.traces.joins.self_time import CommonSteps
from rankscope.analysis.traces.steps import NO_STEP
from rankscope.analysis.traces.trace import Trace


def operations_in_steps(
    traces: Mapping[int, Trace],
    collectives: Mapping[int, Collectives],
    matched: Matched,
    clocks: Clocks,
    steps: CommonSteps,
) -> Operations:
    calls = matched.operations
    step = np.full(len(calls), NO_STEP)
    for rank in steps.windows:
        mine = np.flatnonzero(calls.rank == rank)
        step[mine] = steps.at(rank, *called_ns(traces[rank], collectives[rank], calls.row[mine]))
    start, stop = (clocks.common(calls.rank, times) for times in (calls.start_ns, calls.stop_ns))
    on_one_clock = replace(calls, step=step, start_ns=start, stop_ns=stop)
    chosen = take_rows(on_one_clock, step != NO_STEP)
    in_order = take_rows(chosen, np.lexsort((chosen.start_ns, chosen.rank)))
    return replace(in_order, queued_ns=since_issued(in_order.rank, in_order.queued_ns))
