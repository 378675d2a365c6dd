from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from rankscope.cli import operator
from rankscope.cli.operator import with_certificates
from rankscope.operator.console_access import ConsoleSettings
from rankscope.operator.runtime import OperatorSettings


def settings(*flags: str, alert_host: str | None = None) -> OperatorSettings:
    parser = argparse.ArgumentParser()
    operator.add_arguments(parser)
    base = OperatorSettings(namespace="ns")
    if alert_host is not None:
        base = OperatorSettings(namespace="ns", alert_token_file=Path("/token"), alert_host=alert_host)
    return with_certificates(base, parser.parse_args(flags))


def test_certificates_come_from_files_or_the_operator_not_both() -> None:
    files = ("--tls-certificate", "a", "--tls-key", "b", "--tls-authority", "c")
    assert settings(*files).daemon_tls == (Path("a"), Path("b"), Path("c"))
    kept = settings("--fleet-certificates", "--api-name", "rankscope.example.com").fleet_certificates
    assert kept is not None
    assert kept.namespace == "ns"
    assert kept.roles[-1].names[-1] == "rankscope.example.com"
    for wrong, complaint in (
        (files[:2], "belong together"),
        ((*files, "--fleet-certificates"), "leave one of them out"),
        (("--api-name", "x"), "needs --fleet-certificates"),
        (("--fleet-certificates", "--api-name", "rankscope-daemon"), "use a full host name"),
    ):
        with pytest.raises(ValueError, match=complaint):
            settings(*wrong)


def test_metrics_are_not_guarded_by_tokens_that_others_could_read() -> None:
    with pytest.raises(ValueError, match="--metrics-auth needs --fleet-certificates"):
        settings("--metrics-auth")
    assert settings("--metrics-auth", "--fleet-certificates").metrics_auth


def test_plain_text_alerts_are_refused_where_others_can_listen() -> None:
    with pytest.raises(ValueError, match=r"--alerts-listen 0\.0\.0\.0: others can reach .* there is no TLS"):
        settings(alert_host="0.0.0.0")
    assert settings(alert_host="127.0.0.1").alert_host
    assert settings("--fleet-certificates", alert_host="0.0.0.0").alert_host
    files = ("--api-certificate", "a", "--api-key", "b")
    assert settings(*files, alert_host="0.0.0.0").serving_files == (Path("a"), Path("b"))


def test_console_needs_the_api_and_proxy_names_need_an_authority(tmp_path: Path) -> None:
    def console(*flags: str) -> ConsoleSettings | None:
        parser = argparse.ArgumentParser()
        operator.add_arguments(parser)
        return operator._settings(parser.parse_args(flags)).console

    authority = tmp_path / "ca.crt"
    authority.touch()
    listen = ("--api-listen", "127.0.0.1:0", "--console-listen", "0.0.0.0:9469")
    proxy = ("--console-proxy-name", "login", "--console-proxy-authority", str(authority))
    assert console() is None
    prometheus = ("--prometheus-url", "http://prometheus:9090")
    assert console(*listen, *proxy, "--console-name", "rankscope.example", *prometheus) == ConsoleSettings(
        "0.0.0.0", 9469, ("rankscope.example",), False, "login", authority, "http://prometheus:9090"
    )
    for wrong, complaint in (
        (listen[2:], "needs --api-listen"),
        (proxy, "need --console-listen"),
        (prometheus, "need --console-listen"),
        ((*listen, *proxy[:2]), "belong together"),
        ((*listen, *proxy[2:]), "belong together"),
    ):
        with pytest.raises(ValueError, match=complaint):
            console(*wrong)
    with pytest.raises(OSError, match="nothing"):
        console(*listen, *proxy[:3], "/nothing")
