"""Do the nodes' clocks agree? Synchronous ranks end the same step together, whatever their clocks say."""

from __future__ import annotations

import numpy as np

from rankscope.analysis.robust import Floats, Ints, grouped_max, grouped_median, grouped_min, number_groups


def clock_skews(
    steps_total: Floats, last_step_unix_seconds: Floats, step_seconds: Floats, job: Ints, place: Ints, job_count: int
) -> list[float | None]:
    """Of each job the largest difference between nodes of (end of a rank's last step, moved to a common step); None for
    one node. Rows of one job have the same `step_seconds`."""
    with np.errstate(invalid="ignore", over="ignore"):  # of infinities, which somebody may send
        moved = last_step_unix_seconds - steps_total * step_seconds
    node, node_count = number_groups(job, place)
    job_of_node = np.zeros(node_count, dtype=np.int64)
    job_of_node[node] = job
    medians = grouped_median(moved, node, node_count)
    with np.errstate(invalid="ignore"):
        apart = grouped_max(medians, job_of_node, job_count) - grouped_min(medians, job_of_node, job_count)
    known = np.bincount(job_of_node[~np.isnan(medians)], minlength=job_count) > 1
    return [skew if is_known else None for skew, is_known in zip(apart.tolist(), known.tolist(), strict=True)]
