"""Binaries, rules and configuration for the Prometheus and Alertmanager that `rankscope up --prometheus` starts."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000, "y": 31_536_000_000}
_DURATION = r"(?:\d+(?:ms|[smhdwy]))+"
# Where durations occur: `for`, Alertmanager's grouping (but not its repeat interval), ranges, offsets; then the steps
# of subqueries.
_PLACES = (
    re.compile(
        rf"(?P<before>(?<![\w-])(?:for|keep_firing_for|interval|group_wait|group_interval):\s*[\"']?|\[|\boffset\s+)(?P<duration>{_DURATION})"
    ),
    re.compile(rf"(?P<before>\[{_DURATION}:)(?P<duration>{_DURATION})"),
)
FOLDER_VARIABLE = "RANKSCOPE_PROMETHEUS_DIR"
_HERE = Path(__file__).resolve().parent.parent
_CHECKOUT = _HERE.parents[2]
# Debian uses another name for one of them.
_SPELLINGS = {"prometheus": ("prometheus",), "alertmanager": ("alertmanager", "prometheus-alertmanager")}
CAPTURE_RECEIVER = "rankscope-capture"  # receiver name in the example
LEAST_GROUP_SECONDS = 1.0
# A range of the rules must hold a few scrapes.
SCRAPES_PER_RANGE = 5


# Faster rules: the same expressions, thresholds and labels, with every duration divided.


def hurry(rules: str, factor: float, least_seconds: float) -> str:
    """The text of a rules file (or of Alertmanager's configuration) with its durations divided by `factor`.

    For trying alerts in seconds with the real rules. No duration becomes shorter than `least_seconds`: a range must
    hold a few scrapes, so it should be several times the scrape interval."""

    def shorten(match: re.Match[str]) -> str:
        asked_ms = milliseconds(match["duration"])
        return match["before"] + f"{round(min(asked_ms, max(asked_ms / factor, least_seconds * 1000)))}ms"

    if factor != 1:
        for place in _PLACES:
            rules = place.sub(shorten, rules)
    return rules


def milliseconds(duration: str) -> int:
    """A Prometheus duration (5m, 1h30m, 500ms) in milliseconds."""
    parts = re.findall(r"(\d+)(ms|[smhdwy])", duration)
    return sum(int(number) * _UNITS_MS[unit] for number, unit in parts)


# The binaries of Prometheus and Alertmanager, and Rankscope's rules.


class StackError(Exception):
    """Prometheus or Alertmanager cannot run: which, why and what to do."""


@dataclass(frozen=True)
class Binaries:
    prometheus: Path
    alertmanager: Path


def find_binaries() -> Binaries:
    found = {name: _find(name) for name in _SPELLINGS}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        raise StackError(
            f"{' and '.join(missing)}: not in {FOLDER_VARIABLE}, not on the PATH; next: apt-get install "
            f"--no-install-recommends prometheus prometheus-alertmanager, or name a folder in {FOLDER_VARIABLE}"
        )
    return Binaries(**{name: path for name, path in found.items() if path is not None})


def _find(name: str) -> Path | None:
    # The copy from tools/setup_prometheus.sh comes last: installed programs take precedence.
    folders = (os.environ.get(FOLDER_VARIABLE), os.environ.get("PATH"), str(_CHECKOUT / ".prometheus" / "bin"))
    for folder in filter(None, folders):
        for spelling in _SPELLINGS[name]:
            if found := shutil.which(spelling, path=folder):
                return Path(found).resolve()
    return None


@dataclass(frozen=True)
class Rules:
    files: tuple[Path, ...]
    alertmanager_example: Path


def find_rules() -> Rules:
    """The rules in the wheel, or those of the checkout."""
    for folder in (_HERE / "rules", _CHECKOUT / "rules"):
        files = sorted(path for path in folder.glob("*.yaml") if not path.name.endswith(".example.yaml"))
        example = folder / "alertmanager.example.yaml"
        if files and example.is_file():
            return Rules(tuple(files), example)
    raise StackError("the alerting rules are missing from this installation; install Rankscope again")


@dataclass(frozen=True)
class Pace:
    """Scrape and evaluation interval, and the divisor of the rules' durations."""

    interval_seconds: float = 5.0
    hurry_factor: float = 1.0

    @property
    def least_range_seconds(self) -> float:
        return SCRAPES_PER_RANGE * self.interval_seconds


def prometheus_config(pace: Pace, rules: Path, daemon: str, alertmanager: str) -> dict[str, Any]:
    """JSON is YAML. `daemon` and `alertmanager` are HOST:PORT; `rules` is a directory."""
    interval = _milliseconds(pace.interval_seconds)
    return {
        "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
        "rule_files": [str(rules / "*.yaml")],
        "scrape_configs": [
            # Rankscope's series carry a `job` label of their own.
            {"job_name": "rankscope", "honor_labels": True, "static_configs": [{"targets": [daemon]}]}
        ],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]},
    }


def alertmanager_config(
    pace: Pace, example: str, receiver_url: str, token_file: Path, webhook_url: str | None
) -> dict[str, Any]:
    """The example that comes with the rules, with receivers that exist: Rankscope's for captures, and the webhook
    for notifications to people."""
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
