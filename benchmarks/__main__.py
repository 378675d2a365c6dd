"""`python -m benchmarks [NAME …] [-o FILE]`."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks import (
    capture_latency,
    console_history,
    console_pages,
    daemon_cost,
    fleet,
    gpu_collector,
    overhead,
    path_scale,
    probe_step,
    profile_store,
    registration,
    rule_evaluation,
    timeline_replay,
    trace_analysis,
    verdict_rules,
    window_reading,
)
from benchmarks.reporting import Row, between, machine, table, write_json

log = logging.getLogger(__name__)


def measure_probe() -> list[Row]:
    found = probe_step.measure()
    spread = between(found["probe_ns_per_step_q1"] / 1000, found["probe_ns_per_step_q3"] / 1000)
    return [Row("probe: per step", found["probe_ns_per_step"] / 1000, "µs", spread, 2.0, raw=found)]


BENCHMARKS: Mapping[str, Callable[[], list[Row]]] = {
    "probe": measure_probe,
    "verdicts": verdict_rules.measure,
    "windows": window_reading.measure,
    "path": path_scale.measure,
    "traces": trace_analysis.measure,
    "timeline": timeline_replay.measure,
    "captures": capture_latency.measure,
    "registration": registration.measure,
    "daemon": daemon_cost.measure,
    "profiles": profile_store.measure,
    "console": console_history.measure,
    "pages": console_pages.measure,
    "gpu": gpu_collector.measure,
    "fleet": fleet.measure,
    "rules": rule_evaluation.measure,
    "overhead": overhead.measure,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measures what Rankscope costs.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"which to run: {', '.join(BENCHMARKS)} (default: all)"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the raw numbers there")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    rows: list[Row] = []
    failed = False
    for name in arguments.names or BENCHMARKS:
        print(f"==> {name}", file=sys.stderr, flush=True)
        started = time.monotonic()
        try:
            rows += BENCHMARKS[name]()
        except Exception:
            log.exception("%s could not run", name)
            failed = True
        print(f"    {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    print(table(rows))
    if arguments.output:
        write_json(arguments.output, rows)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
