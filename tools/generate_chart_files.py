"""Write the chart's README.md and what it takes from elsewhere in this repository, or with --check tell whether that is
fresh: `make chart`. Helm reads nothing outside a chart's own folder."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from rankscope.operator.kube.crds import KINDS, definition
from rankscope.operator.webhooks.configuration import Address, configurations
from tools.chart_readme import readme

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "deploy" / "helm" / "rankscope"
README_TEMPLATE = ROOT / "tools" / "chart_readme.md"
NOTE = "# Written by `make chart`; do not edit.\n"
# In place of the namespace that only the release knows.
NAMESPACE = "RELEASE-NAMESPACE"
SERVICE = "rankscope-webhook"


def fresh_files() -> dict[str, str]:
    """By their path below the chart's folder."""
    page = {"README.md": readme(README_TEMPLATE, CHART / "values.yaml")}
    return page | {f"files/{name}": text for name, text in (*_definitions(), *_webhooks(), *_rules(), *_dashboards())}


def _definitions() -> Iterator[tuple[str, str]]:
    for kind in KINDS:
        yield f"crds/{kind.plural}.yaml", NOTE + yaml.safe_dump(definition(kind), sort_keys=False, width=120)


def _webhooks() -> Iterator[tuple[str, str]]:
    for configuration in configurations(Address(NAMESPACE, SERVICE)):
        name = configuration["kind"].removesuffix("WebhookConfiguration").lower()
        text = yaml.safe_dump({"webhooks": configuration["webhooks"]}, sort_keys=False, width=120)
        yield f"webhooks/{name}.yaml", NOTE + text


def _rules() -> Iterator[tuple[str, str]]:
    for name in ("recording", "alerts"):
        yield f"rules/{name}.yaml", NOTE + (ROOT / "rules" / f"{name}.yaml").read_text()


def _dashboards() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "deploy" / "grafana" / "json").glob("*.json")):
        # Without spaces: a release is kept in a Secret of at most a mebibyte, files and what is made of them both.
        packed = json.dumps(json.loads(path.read_text()), ensure_ascii=False, separators=(",", ":"))
        yield f"dashboards/{path.name}", packed + "\n"


def stale_files(fresh: dict[str, str]) -> list[str]:
    folders = {Path(name).parent for name in fresh if name.startswith("files/")}
    committed = {str(path.relative_to(CHART)) for folder in folders for path in (CHART / folder).glob("*")}
    return sorted(name for name in {*fresh, *committed} if fresh.get(name) != _committed(name))


def _committed(name: str) -> str | None:
    path = CHART / name
    return path.read_text() if path.is_file() else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a committed file differs; write nothing")
    arguments = parser.parse_args()
    fresh = fresh_files()
    stale = stale_files(fresh)
    if arguments.check:
        if stale:
            sys.stderr.write(f"error: not fresh in {CHART.relative_to(ROOT)}: {', '.join(stale)}. Next: make chart\n")
        return 1 if stale else 0
    for name in stale:
        path = CHART / name
        if name in fresh:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(fresh[name])
        else:
            path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
