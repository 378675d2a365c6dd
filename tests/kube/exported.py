"""What an operator's /metrics say, as tests ask it."""

from __future__ import annotations

import re

from rankscope.common.run_names import run_labels
from tests.kube.operator_process import OperatorProcess


def verdicts(operator: OperatorProcess, job: str) -> set[str]:
    """Of a job; none if it is not this replica's."""
    lines = _lines(operator, "rankscope_job_verdict", job)
    return {match[1] for line in lines if (match := re.search(r'[{,]verdict="(\w+)"', line))}


def culprits(operator: OperatorProcess, job: str) -> set[int]:
    lines = _lines(operator, "rankscope_job_culprit", job)
    return {int(match[1]) for line in lines if (match := re.search(r'[{,]rank="(\d+)"', line))}


def messages_heard(operator: OperatorProcess) -> float:
    match = re.search(r"^rankscope_operator_messages_total (\S+)", operator.get("/metrics"), re.MULTILINE)
    assert match is not None
    return float(match[1])


def _lines(operator: OperatorProcess, name: str, job: str) -> list[str]:
    wanted = [f'{label}="{value}"' for label, value in run_labels(job).items()]
    lines = [line for line in operator.get("/metrics").splitlines() if line.startswith(f"{name}{{")]
    return [line for line in lines if all(text in line for text in wanted) and line.endswith(" 1.0")]
