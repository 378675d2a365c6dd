"""A short run of every target: its seeds, the inputs that once broke something, and a number of mutations, always the
same. The long runs are `python -m tests.fuzz`."""

from __future__ import annotations

import dataclasses

import pytest

from tests.fuzz import targets
from tests.fuzz.fuzzing import Fuzzer, Tally
from tests.support.measuring import Measured

# By how long one takes: about a second of a quiet core each.
EXECUTIONS = {
    "capture": 10,
    "inspector": 50,
    "trace": 50,
    "nccl": 100,
    "dcgm": 150,
    "reading": 150,
    "ring": 100,
    "windows": 200,
}
EXECUTIONS_OF_OTHERS = 600
# So long that nothing but an endless loop takes it.
ENDLESS_CPU_SECONDS = 20.0


@pytest.mark.parametrize("name", targets.names())
def test_no_input_breaks_a_parser(name: str, measured: Measured) -> None:
    target = targets.load(name)
    assert target.seeds, f"{name} has no real bytes to begin with"
    fuzzer = Fuzzer(dataclasses.replace(target, cpu_seconds=ENDLESS_CPU_SECONDS), seed=1, coverage=None)
    fuzzer.plant([])
    assert not fuzzer.tally.findings, _words(fuzzer.tally)
    enough = len(target.seeds) + EXECUTIONS.get(name, EXECUTIONS_OF_OTHERS)
    fuzzer.fuzz(lambda tally: tally.executions < enough)
    assert not fuzzer.tally.findings, _words(fuzzer.tally)
    slowest = fuzzer.tally.slowest_cpu_seconds
    measured(f"CPU time of the slowest input ({name})", slowest, "s", at_most=target.cpu_seconds)


def _words(tally: Tally) -> str:
    return "\n\n".join(f"{finding.text}\ninput: {finding.data!r:.2000}" for finding in tally.findings.values())
