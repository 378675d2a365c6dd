"""Make docs/metrics.md from tools/metrics_page_template.md and the exporters; with --check tell whether it is fresh.

A line `{{metrics PREFIX … without LABEL …}}` of the template becomes a table of the metrics whose names begin so; the
labels named, which they all have, are left out of it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from tools.exported_metrics import ExportedMetric, exported_metrics

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = ROOT / "tools" / "metrics_page_template.md"
PAGE = ROOT / "docs" / "metrics.md"
NOTE = "<!-- Made by `make docs`: edit tools/metrics_page_template.md, or the help texts in the code. -->\n"
_TABLE = re.compile(r"^\{\{metrics ([a-z_ ]+?)(?: without ([a-z_ ]+))?\}\}$", re.MULTILINE)


class TemplateError(ValueError):
    """The template and the metrics do not go together."""


def page(template: str, metrics: Mapping[str, ExportedMetric]) -> str:
    left = dict(metrics)

    def fill(match: re.Match[str]) -> str:
        prefixes, shared = tuple(match[1].split()), (match[2] or "").split()
        chosen = [metrics[name] for name in metrics if name.startswith(prefixes)]
        if not chosen:
            raise TemplateError(f"{match[0]}: no metric is named so")
        for metric in chosen:
            if left.pop(metric.name, None) is None:
                raise TemplateError(f"{metric.name} is in two tables")
            if missing := set(shared) - set(metric.labels):
                raise TemplateError(f"{metric.name} lacks {', '.join(sorted(missing))}, which its table says all have")
        return _table(chosen, shared)

    text = _TABLE.sub(fill, template)
    if left:
        raise TemplateError(f"no table for {', '.join(left)}; add its prefix to {TEMPLATE.relative_to(ROOT)}")
    return NOTE + text


def _table(metrics: Iterable[ExportedMetric], shared: Iterable[str]) -> str:
    rows = ["| metric | type | further labels | meaning |", "|---|---|---|---|"]
    for metric in metrics:
        labels = [_label(name, values) for name, values in metric.labels.items() if name not in shared]
        meaning = metric.help.replace("|", "\\|")
        rows.append(f"| `{metric.name}` | {metric.type} | {', '.join(labels)} | {meaning} |".replace("|  |", "| |"))
    return "\n".join(rows)


def _label(name: str, values: tuple[str, ...]) -> str:
    return f"`{name}` ({', '.join(f'`{value}`' for value in values)})" if values else f"`{name}`"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the committed page differs; write nothing")
    arguments = parser.parse_args()
    try:
        fresh = page(TEMPLATE.read_text(), exported_metrics())
    except TemplateError as error:
        print(f"error: {TEMPLATE.relative_to(ROOT)}: {error}", file=sys.stderr)
        return 1
    if not arguments.check:
        PAGE.write_text(fresh)
    elif PAGE.read_text() != fresh:
        print("error: docs/metrics.md is not fresh. Next step: make docs", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
