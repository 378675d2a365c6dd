from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from rankscope.cli import prometheus_stack as stack_files
from rankscope.cli.prometheus_stack import (
    Pace,
    StackError,
    alertmanager_config,
    find_binaries,
    find_rules,
    hurry,
    milliseconds,
    prometheus_config,
)
from rankscope.cli.up import Alerting, add_alert_arguments
from rankscope.daemon.config import SETTINGS, Config, ConfigError
from rankscope.operator.alerts.alertmanager_webhook import TokenError

RULES = """\
groups:
  - name: a
    interval: 30s
    rules:
      - record: job:x:max5m  # for 5m
        expr: max_over_time(rate(x{mode="for: 5m"}[5m])[1h:1m]) > x offset 1h30m
      - {alert: A, expr: x[2s] > 300, for: 10m, keep_firing_for: "1h"}
"""


def test_a_hurry_divides_durations_and_nothing_else() -> None:
    hurried = hurry(RULES, 10, least_seconds=4)
    assert "interval: 4000ms" in hurried
    assert "[30000ms])[360000ms:6000ms]) > x offset 540000ms" in hurried
    assert 'for: 60000ms, keep_firing_for: "360000ms"' in hurried
    assert "x[2000ms] > 300" in hurried  # shorter than the least already: it stays
    assert "max5m  # for 5m" in hurried
    assert hurry(RULES, 1, least_seconds=4) == RULES


def test_durations_are_read_as_prometheus_writes_them() -> None:
    assert [milliseconds(text) for text in ("500ms", "5m", "1h30m", "1d")] == [500, 300_000, 5_400_000, 86_400_000]


def test_hurrying_the_shipped_rules_changes_only_durations() -> None:
    for path in find_rules().files:
        text = path.read_text()
        hurried = hurry(text, 10, least_seconds=1)
        assert hurried != text
        duration = r"(?:\d+(?:ms|[smhdwy]))+"
        assert re.sub(rf"\b{duration}\b", "D", hurried) == re.sub(rf"\b{duration}\b", "D", text)


def test_prometheus_scrapes_under_a_name_that_the_rules_look_for() -> None:
    config = prometheus_config(Pace(1.0), Path("/rules"), "127.0.0.1:9464", "127.0.0.1:9093")
    [scrape] = config["scrape_configs"]
    assert "rankscope" in scrape["job_name"]
    assert config["global"]["evaluation_interval"] == "1000ms"


def test_alertmanager_keeps_example_grouping_and_inhibition_with_real_receivers() -> None:
    example = find_rules().alertmanager_example.read_text()
    config = alertmanager_config(Pace(1.0, 10), example, "http://127.0.0.1:1/a", Path("/token"), "http://127.0.0.1:2/")
    assert config["route"]["group_by"] == ["cluster", "run_namespace", "run"]
    assert any("RankscopeHang" in str(rule["source_matchers"]) for rule in config["inhibit_rules"])
    receivers = {receiver["name"]: receiver["webhook_configs"] for receiver in config["receivers"]}
    assert receivers.pop("rankscope-capture") == [
        {
            "url": "http://127.0.0.1:1/a",
            "send_resolved": False,
            "http_config": {"authorization": {"type": "Bearer", "credentials_file": "/token"}},
        }
    ]
    assert receivers
    assert all(hooks == [{"url": "http://127.0.0.1:2/", "send_resolved": True}] for hooks in receivers.values())
    assert milliseconds(config["route"]["group_wait"]) < milliseconds("15s")


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_alert_arguments(parser)
    return parser.parse_args(words)


def config(**settings: object) -> Config:
    return Config(**{setting.name: setting.default() for setting in SETTINGS} | settings)


def test_missing_binaries_are_named_with_the_command_that_brings_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("RANKSCOPE_PROMETHEUS_DIR", raising=False)
    monkeypatch.setattr(stack_files, "_CHECKOUT", tmp_path)
    with pytest.raises(StackError, match=r"prometheus and alertmanager: .* apt-get install .*prometheus-alertmanager"):
        Alerting(parsed("--prometheus"), config())
    for name in ("prometheus", "prometheus-alertmanager"):
        (tmp_path / name).touch(mode=0o755)
    assert find_binaries().alertmanager == tmp_path / "prometheus-alertmanager"


def test_without_the_flags_there_is_no_receiver() -> None:
    assert Alerting(parsed(), config()).settings is None


def test_the_alert_receiver_needs_a_private_token(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs --alerts-token FILE"):
        Alerting(parsed("--alerts-listen", "127.0.0.1:0"), config())
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    token.chmod(0o644)
    flags = ("--alerts-listen", "127.0.0.1:0", "--alerts-token", str(token))
    with pytest.raises(TokenError, match="chmod 600"):
        Alerting(parsed(*flags), config())
    token.chmod(0o600)
    settings = Alerting(parsed(*flags), config()).settings
    assert settings is not None
    assert settings.token == b"0123456789abcdef"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--alerts-webhook", "http://127.0.0.1/"), "needs --prometheus"),
        (("--prometheus", "--alerts-webhook", "file:///etc/passwd"), "must be an http"),
        (("--prometheus", "--prometheus-listen", "none"), "must be HOST:PORT"),
        (("--prometheus", "--prometheus-listen", "0.0.0.0:9090"), "others can reach this address"),
        (("--prometheus", "--alertmanager-listen", "[::]:9093"), "others can reach this address"),
        (("--alerts-listen", "0.0.0.0:9467", "--alerts-token", "/token"), "others can reach this address"),
        (("--prometheus", "--alerts-listen", "none"), "needs the receiver"),
        (("--prometheus", "--prometheus-url", "http://127.0.0.1:9090"), "leave --prometheus-url out"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_starts(
    words: tuple[str, ...], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("prometheus", "alertmanager"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("RANKSCOPE_PROMETHEUS_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match=why):
        Alerting(parsed(*words), config())
    with pytest.raises(ConfigError, match="nothing to scrape"):
        Alerting(parsed("--prometheus"), config(metrics_listen="none"))
