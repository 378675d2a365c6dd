"""Does the probe change what torch.compile does? Graph breaks and recompilations of the same job, with it and without.

    python3 -m benchmarks.gpu.compiling [--models ddp,fsdp2,tp,optimizer] [--compiler inductor] [--cpu]

See README.md beside this for what has to be on PYTHONPATH."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.lab import lab_job, multi_process_service, probe_folder
from benchmarks.gpu.reporting import Report
from benchmarks.running import BenchmarkError

MODELS = "ddp,fsdp2,tp,optimizer"
COMPARED = ("graph_breaks", "recompiles", "compilations", "unique_graphs", "break_reasons", "frames")
# Otherwise the second job finds the backward graphs of the first in inductor's cache on disk, and compiles fewer.
NO_CACHE = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
# Torch itself breaks the graph of a step that has no hooks, to profile it.
HOOKED = "optimizer"
RUN_SECONDS, CPU_RUN_SECONDS = 120.0, 400.0


def counted(asked: argparse.Namespace, environment: dict[str, str], probe: Path | None, model: str) -> dict[str, Any]:
    """What rank 0 counted. Other ranks must have counted the same: they run the same program."""
    words = ["--model", model, *(["--compiler", asked.compiler] if asked.compiler else [])]
    label = f"compile-{model}"
    with lab_job(
        "compile_job.py", words, cpu=asked.cpu, ranks=asked.ranks, environment=environment, probe=probe, label=label
    ) as job:
        job.wait_until_ended(CPU_RUN_SECONDS if asked.cpu else RUN_SECONDS)
        found = [job.fact(f"counts-{rank}.json") for rank in range(asked.ranks)]
    first = found[0]
    if first is None or any(one is None or _compared(one) != _compared(first) for one in found):
        raise BenchmarkError(f"the ranks of {model} differ: {found}")
    return first


def _compared(counts: dict[str, Any]) -> dict[str, Any]:
    return {name: counts[name] for name in COMPARED}


def compare(report: Report, asked: argparse.Namespace, environment: dict[str, str], probe: Path, model: str) -> None:
    without = counted(asked, environment, None, model)
    watched = counted(asked, environment, probe, model)
    report.raw[model] = {"without": without, "with": watched}
    if without["probe"] or not watched["probe"]:
        raise BenchmarkError(f"the probe was in the wrong job: {without['probe']}, {watched['probe']}")
    shown = ", ".join(f"{watched[name]} {name.replace('_', ' ')}" for name in COMPARED[:4])
    expected = ", ".join(str(without[name]) for name in COMPARED[:4])
    if model == HOOKED:
        met = all(watched[name] <= without[name] for name in COMPARED[:4])
        report.add(f"compiled {model}", shown, f"no more than without the probe: {expected}", met)
    else:
        met = _compared(without) == _compared(watched)
        report.add(f"compiled {model}", shown, f"as without the probe: {expected}", met)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--compiler", help="backend of torch.compile (default: inductor where it can compile)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--budget", type=float, default=240.0, help="seconds; what would not fit is left out")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--cpu", action="store_true", help="over gloo, without a GPU")
    asked = parser.parse_args()
    report = Report(
        "torch.compile with the probe" + (", without a GPU" if asked.cpu else ""), asked.out, "compile", asked.budget
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with contextlib.ExitStack() as stack:
        stack.callback(report.finish)
        probe = probe_folder(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rankscope-probe-"))))
        environment = NO_CACHE | ({} if asked.cpu else stack.enter_context(multi_process_service()))
        for model in asked.models.split(","):
            report.part(model, partial(compare, report, asked, environment, probe, model), 10 if asked.cpu else 40)
    return int(report.has_missed)


if __name__ == "__main__":
    sys.exit(main())
