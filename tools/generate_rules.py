"""Write the thresholds into the Prometheus rules and the docs from rankscope/analysis/verdicts/thresholds.py, or with
--check fail if a committed file is stale: `make rules`.

- rules/recording.yaml: the group rankscope.thresholds, with every threshold that a rule reads.
- docs/alerts.md: the number behind each threshold's name.
- docs/verdicts.md: the tables of verdicts and thresholds."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from rankscope.analysis.verdicts.thresholds import AlertThresholds, Policy, Threshold, table
from rankscope.analysis.verdicts.verdict import Kind

ROOT = Path(__file__).resolve().parents[1]
RULES = ROOT / "rules"
ALERTS_PAGE = ROOT / "docs" / "alerts.md"
VERDICTS_PAGE = ROOT / "docs" / "verdicts.md"
NAME = r"rankscope:threshold:(\w+)"
GROUP = re.compile(r"  - name: rankscope\.thresholds\n.*?(?=\n  - name: )", re.DOTALL)
THRESHOLDS = {one.name: one for of in (Policy, AlertThresholds) for one in table(of)}


def fresh_files() -> dict[Path, str]:
    recording = (RULES / "recording.yaml").read_text()
    rules = GROUP.sub("", recording) + (RULES / "alerts.yaml").read_text()
    read = set(re.findall(NAME, rules))
    group = _group(one for name, one in THRESHOLDS.items() if name in read)
    alerts = re.sub(
        rf"`{NAME}` [0-9.]+(?<!\.)",
        lambda found: f"`rankscope:threshold:{found[1]}` {_number(found[1])}",
        ALERTS_PAGE.read_text(),
    )
    return {
        RULES / "recording.yaml": GROUP.sub(lambda _: group, recording),
        ALERTS_PAGE: alerts,
        VERDICTS_PAGE: _verdicts_page(),
    }


def _group(thresholds: Iterable[Threshold]) -> str:
    lines = [
        "  - name: rankscope.thresholds",
        "    # Written by `make rules` from analysis/rankscope/analysis/verdicts/thresholds.py. For other values load",
        "    # a copy of this group with your numbers in place of this one.",
        "    rules:",
    ]
    for one in thresholds:
        lines.append(f"      # {one.meaning}")
        lines.append(f'      - {{record: "rankscope:threshold:{one.name}", expr: vector({_number(one.name)})}}')
    return "\n".join(lines) + "\n"


def _number(name: str) -> str:
    return f"{THRESHOLDS[name].default:.12g}"


def _verdicts_page() -> str:
    kinds = [f"| `{kind.value}` | {kind.meaning} |" for kind in Kind]
    return "\n".join(
        [
            "# Verdicts and thresholds",
            "",
            "Written by `make rules` from `analysis/rankscope/analysis/verdicts/`. Do not edit.",
            "[Concepts](concepts.md) explains how a verdict is reached, [policies](policies.md) how to change",
            "thresholds per run, [alerts](alerts.md#change-a-threshold) how to change those of the Prometheus rules.",
            "",
            "## Verdicts",
            "",
            "| kind | meaning |",
            "|---|---|",
            *kinds,
            "",
            "## Thresholds of the detector",
            "",
            "The Prometheus rules read some of them as `rankscope:threshold:<name>`.",
            "",
            *_table(Policy),
            "",
            "## Thresholds of alerts only",
            "",
            *_table(AlertThresholds),
            "",
        ]
    )


def _table(of: type[Policy] | type[AlertThresholds]) -> list[str]:
    rows = [
        f"| `{one.name}` | {'none' if one.default is None else _number(one.name)} | {one.unit} | {one.meaning} |"
        for one in table(of)
    ]
    return ["| threshold | default | unit | meaning |", "|---|---|---|---|", *rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a committed file differs; write nothing")
    arguments = parser.parse_args()
    stale = {path: text for path, text in fresh_files().items() if not path.is_file() or path.read_text() != text}
    if arguments.check:
        if stale:
            names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
            sys.stderr.write(f"error: stale: {names}. Next: make rules\n")
        return 1 if stale else 0
    for path, text in stale.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
