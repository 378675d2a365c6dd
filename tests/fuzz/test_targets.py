"""A short run of every target: its seeds, the inputs that once broke something, and a number of mutations, always the
same. The long runs are `python -m tests.fuzz`."""

from __future__ import annotations

import pytest

from tests.fuzz import targets
from tests.fuzz.fuzzing import Fuzzer, Tally

# By how long one takes: about a second of a quiet core each.
EXECUTIONS = {"capture": 15, "trace": 50, "reading": 150, "ring": 100, "windows": 200}
EXECUTIONS_OF_OTHERS = 600


@pytest.mark.parametrize("name", targets.names())
def test_no_input_breaks_a_parser(name: str) -> None:
    target = targets.load(name)
    assert target.seeds, f"{name} has no real bytes to begin with"
    fuzzer = Fuzzer(target, seed=1, coverage=None)
    fuzzer.plant([])
    assert not fuzzer.tally.findings, _words(fuzzer.tally)
    enough = len(target.seeds) + EXECUTIONS.get(name, EXECUTIONS_OF_OTHERS)
    fuzzer.fuzz(lambda tally: tally.executions < enough)
    assert not fuzzer.tally.findings, _words(fuzzer.tally)


def _words(tally: Tally) -> str:
    return "\n\n".join(f"{finding.text}\ninput: {finding.data!r:.2000}" for finding in tally.findings.values())
