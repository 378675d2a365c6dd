"""Write the dashboards to json/, or with --check tell whether what is committed is fresh: `make dashboards`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from deploy.grafana.daemons import daemons
from deploy.grafana.fleet import fleet
from deploy.grafana.job import job
from deploy.grafana.rank import rank

FOLDER = Path(__file__).resolve().parent / "json"


def dashboards() -> dict[str, dict[str, Any]]:
    """By the name of their file."""
    return {f"{made['uid']}.json": made for made in (fleet(), job(), rank(), daemons())}


def text(dashboard: dict[str, Any]) -> str:
    return json.dumps(dashboard, indent=2, ensure_ascii=False) + "\n"


def stale_files() -> list[str]:
    fresh = {name: text(dashboard) for name, dashboard in dashboards().items()}
    committed = {path.name: path.read_text() for path in FOLDER.glob("*.json")}
    return sorted(name for name in {*fresh, *committed} if fresh.get(name) != committed.get(name))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a committed file differs; write nothing")
    stale = stale_files()
    if parser.parse_args().check:
        if stale:
            sys.stderr.write(f"error: not fresh: {', '.join(stale)}. Next step: make dashboards\n")
        return 1 if stale else 0
    FOLDER.mkdir(exist_ok=True)
    fresh = dashboards()
    for name in stale:
        if name in fresh:
            (FOLDER / name).write_text(text(fresh[name]))
        else:
            (FOLDER / name).unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
