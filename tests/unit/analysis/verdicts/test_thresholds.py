"""Every number that a verdict depends on is in the table of thresholds."""

from __future__ import annotations

import ast
from math import log10
from pathlib import Path

from rankscope.analysis.verdicts import thresholds
from rankscope.analysis.verdicts.thresholds import AlertThresholds, FixedThresholds, FleetThresholds, Policy, table

# Nothing is judged by these: mathematics, bounds of what is plausible or of CPU time, how long to remember, and how to
# round a text.
NOT_THRESHOLDS = {
    *("slow_rank.py 2.563", "figures.py 2.0", "figures.py 86400.0", "exposed_communication.py 2.0"),
    *("stack_profiles.py 300.0", "network_causes.py 45.0", "network_causes.py 0.5", "long_steps.py 0.05"),
    *("long_steps.py 0.95", "critical_path.py 7e-06", "critical_path.py 0.1", "critical_path.py 60.0"),
}


def numbers(path: Path) -> set[str]:
    """Except for powers of ten, which are units."""
    values = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
    floats = [value for value in values if isinstance(value, float) and value != 0]
    return {f"{path.name} {value}" for value in floats if not log10(value).is_integer() or value == 0.1}


def test_verdicts_take_their_numbers_from_the_table() -> None:
    modules = sorted(Path(thresholds.__file__).parent.glob("*.py"))
    found = set().union(*(numbers(path) for path in modules if path.name != "thresholds.py"))
    assert found == NOT_THRESHOLDS


def test_every_threshold_has_one_default() -> None:
    names = [one.name for of in (Policy, FixedThresholds, AlertThresholds, FleetThresholds) for one in table(of)]
    assert len(names) == len(set(names))
