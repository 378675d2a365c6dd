"""What Holistic Trace Analysis says of traces: `.venv-hta/bin/python tools/hta_breakdown.py FILE …` prints for each
file a JSON object, in microseconds and percent, or with its error. tools/setup_hta.sh makes the environment."""

from __future__ import annotations

import json
import logging
import math
import sys
import warnings
from typing import Any

warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)

from hta.trace_analysis import TraceAnalysis  # noqa: E402 - it logs while it is imported

TIMES = {
    "span_us": "kernel_time(us)",
    "compute_us": "compute_time(us)",
    "non_compute_us": "non_compute_time(us)",
    "idle_us": "idle_time(us)",
}


def analyse(path: str) -> dict[str, Any]:
    analysis = TraceAnalysis(trace_files={0: path}, trace_dir="/")
    times = analysis.get_temporal_breakdown(visualize=False).iloc[0]
    found: dict[str, Any] = {ours: float(times[theirs]) for ours, theirs in TIMES.items()}
    overlap = float(analysis.get_comm_comp_overlap(visualize=False).iloc[0]["comp_comm_overlap_pctg"])
    return found | {"overlap_percent": None if math.isnan(overlap) else overlap}


def main() -> None:
    for path in sys.argv[1:]:
        try:
            found = analyse(path)
        except Exception as error:  # noqa: BLE001 - a trace it cannot analyse is a result, too
            found = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps({"file": path} | found), flush=True)


if __name__ == "__main__":
    main()
