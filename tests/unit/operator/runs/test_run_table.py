"""What `kubectl get trainingruns` prints: columns of the kind, values of a status, as README.md shows them."""

from __future__ import annotations

import re
from functools import reduce
from pathlib import Path
from typing import Any

import msgspec

from rankscope.analysis.verdicts.verdict import Kind, Severity, Verdict
from rankscope.operator.correlation.correlator import JobState
from rankscope.operator.kube.crds import KINDS
from rankscope.operator.kube.resources import TrainingRunSpec, TrainingRunStatus, Workload
from rankscope.operator.runs.inventory import Run, RunKey
from rankscope.operator.runs.status import run_status

README = Path(__file__).parents[4] / "README.md"
GAP = 3  # spaces after the widest cell of a column
SLOW = Verdict(Kind.SLOW_RANK, "", Severity.ALARM, culprits=(2,))


def printed(rows: list[list[str]]) -> str:
    """As kubectl aligns its columns."""
    widths = [max(map(len, column)) + GAP for column in zip(*rows, strict=True)]
    lines = ["".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def test_the_readme_shows_a_run_as_kubectl_prints_it() -> None:
    key = RunKey("team", "PyTorchJob", "llama")
    state = JobState("team/pytorchjob-llama", 4, SLOW, 0.0, 0.0, 4, 0.076, None, 0.61, ())
    status = run_status(Run(key, {}), state, TrainingRunStatus(), 1, 0.0)
    spec = TrainingRunSpec(workload=Workload(kind=key.kind, name=key.name))
    run: dict[str, Any] = {"spec": msgspec.to_builtins(spec), "status": msgspec.to_builtins(status)}
    (columns,) = (kind.columns for kind in KINDS if kind.kind == "TrainingRun")
    values = ["3m" if type_ == "date" else value_at(run, path) for _, type_, path in columns]
    header = ["NAMESPACE", "NAME", *(name.upper() for name, _, _ in columns)]
    shown = re.search(r"^NAMESPACE .*?(?=```)", README.read_text(), re.MULTILINE | re.DOTALL)
    assert shown is not None
    assert shown[0] == printed([header, [key.namespace, key.object_name, *values]])


def value_at(thing: dict[str, Any], path: str) -> str:
    """Empty where the status has no such field, as in the API server's table."""
    return str(reduce(lambda part, name: part.get(name, {}), path.strip(".").split("."), thing) or "")
