"""The configuration of the Prometheus and the Alertmanager that `rankscope up --prometheus` starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankscope.cli.prometheus_stack.files import StackError
from rankscope.cli.prometheus_stack.rules import hurry

CAPTURE_RECEIVER = "rankscope-capture"  # in the example
LEAST_GROUP_SECONDS = 1.0
# A range of the rules must hold a few scrapes.
SCRAPES_PER_RANGE = 5


@dataclass(frozen=True)
class Pace:
    """How often is scraped and evaluated, and by how much the rules' own durations are divided."""

    interval_seconds: float = 5.0
    hurry_factor: float = 1.0

    @property
    def least_range_seconds(self) -> float:
        return SCRAPES_PER_RANGE * self.interval_seconds


def prometheus_config(pace: Pace, rules: Path, daemon: str, alertmanager: str) -> dict[str, Any]:
    """JSON is YAML. `daemon` and `alertmanager` are HOST:PORT; `rules` is a folder of files."""
    interval = _milliseconds(pace.interval_seconds)
    return {
        "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
        "rule_files": [str(rules / "*.yaml")],
        "scrape_configs": [
            # Our series carry a `job` label of their own.
            {"job_name": "rankscope", "honor_labels": True, "static_configs": [{"targets": [daemon]}]}
        ],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]},
    }


def alertmanager_config(
    pace: Pace, example: str, receiver_url: str, token_file: Path, webhook_url: str | None
) -> dict[str, Any]:
    """The example that comes with the rules, with receivers that are there: ours for captures, and the webhook for all
    that would go to people."""
    config: dict[str, Any] = _read_yaml(hurry(example, pace.hurry_factor, LEAST_GROUP_SECONDS))
    authorization = {"type": "Bearer", "credentials_file": str(token_file)}
    captures = {"url": receiver_url, "send_resolved": False, "http_config": {"authorization": authorization}}
    others = [] if webhook_url is None else [{"url": webhook_url, "send_resolved": True}]
    config["receivers"] = [
        {"name": receiver["name"], "webhook_configs": [captures] if receiver["name"] == CAPTURE_RECEIVER else others}
        for receiver in config["receivers"]
    ]
    return config


def _read_yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise StackError("--prometheus needs PyYAML; next: pip install 'rankscope[cli]'") from error
    return yaml.safe_load(text)


def _milliseconds(seconds: float) -> str:
    return f"{round(seconds * 1000)}ms"
