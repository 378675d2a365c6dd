"""The rules and the example configurations, by the tools of those who will read them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest
import yaml

from rankscope.cli.prometheus_stack import with_links
from tests.promql_reading import runbook_queries
from tests.rule_series import ALERTS, ENFORCED, promtool_test
from tools.prometheus_binaries import binary

RULES = Path(__file__).resolve().parents[2] / "rules"
PATIENCE_SECONDS = 280.0


def run(tool: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(binary(tool)), *arguments],
        cwd=RULES,
        env=os.environ | {"GOGC": "400"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )


def test_promtool_accepts_the_rules() -> None:
    checked = run("promtool", "check", "rules", "recording.yaml", "alerts.yaml")
    assert checked.returncode == 0 and "FAILED" not in checked.stdout + checked.stderr, checked.stdout + checked.stderr


def test_promtool_accepts_the_queries_of_runbooks(tmp_path: Path) -> None:
    queries = [{"record": f"{page.stem}_{number}", "expr": q} for number, (page, q) in enumerate(runbook_queries())]
    assert len(queries) > len(list((RULES / "runbooks").iterdir()))
    (tmp_path / "queries.yaml").write_text(json.dumps({"groups": [{"name": "runbooks", "rules": queries}]}))
    checked = run("promtool", "check", "rules", str(tmp_path / "queries.yaml"))
    assert checked.returncode == 0 and "FAILED" not in checked.stdout + checked.stderr, checked.stdout + checked.stderr


def test_promtool_accepts_the_example_prometheus_and_its_rules() -> None:
    checked = run("promtool", "check", "config", "prometheus.example.yaml")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "Checking recording.yaml" in checked.stdout and "Checking alerts.yaml" in checked.stdout


def test_amtool_accepts_the_example_of_an_alertmanager() -> None:
    checked = run("amtool", "check-config", "alertmanager.example.yaml")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_alertmanager_routes_pages_captures_and_the_rest() -> None:
    def receivers(*labels: str) -> str:
        routed = run("amtool", "config", "routes", "test", "--config.file=alertmanager.example.yaml", *labels)
        assert routed.returncode == 0, routed.stderr
        return routed.stdout.strip()

    assert receivers("alertname=RankscopeHang", "severity=critical", "run=a") == "pager"
    slow = ("alertname=RankscopeStragglerRank", "run=a", "rank=3", "capture=true")
    assert receivers(*slow, "severity=critical") == "rankscope-capture,pager"
    assert receivers(*slow, "severity=warning") == "rankscope-capture,chat"
    assert receivers("alertname=RankscopeDaemonDown", "severity=warning", "instance=a") == "chat"
    assert receivers("alertname=RankscopeMemoryFragmented", "severity=info", "run=a") == "quiet"


def copy_rules(
    folder: Path, alerts: Collection[str], tested: str = "", enforced: Mapping[str, str] | None = None
) -> list[str]:
    """The rules of these alerts, and the recording rules that they and what is `tested` read, by way of others as well:
    the rest is most of the time of a test. `enforced` labels are added to recorded series."""
    kept = yaml.safe_load((RULES / "alerts.yaml").read_text())
    for group in kept["groups"]:
        group["rules"] = [rule for rule in group["rules"] if rule["alert"] in alerts]
    assert any(group["rules"] for group in kept["groups"])
    (folder / "alerts.yaml").write_text(json.dumps(kept))  # JSON is YAML
    recording = yaml.safe_load((RULES / "recording.yaml").read_text())
    read = json.dumps(kept) + tested
    left = [rule for group in recording["groups"] for rule in group["rules"]]
    while found := [rule for rule in left if rule["record"] in read]:
        read += json.dumps(found)
        left = [rule for rule in left if rule not in found]
    for group in recording["groups"]:
        group["rules"] = [{**rule, "labels": dict(enforced or {})} for rule in group["rules"] if rule not in left]
    (folder / "recording.yaml").write_text(json.dumps(recording))
    return [group["name"] for group in recording["groups"] + kept["groups"]]


@pytest.mark.parametrize("alert", sorted(path.stem for path in (RULES / "tests").glob("*.yaml")))
def test_an_alert_does_what_its_promtool_test_says(alert: str, tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    copied = shutil.copy(RULES / "tests" / f"{alert}.yaml", tmp_path / "tests")
    copy_rules(tmp_path, {alert}, Path(copied).read_text())
    tested = run("promtool", "test", "rules", str(copied))
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_links_of_alerts_name_run_rank_node_or_daemon(tmp_path: Path) -> None:
    """Each link that there is, of an alert with names that a URL cannot have as they are."""
    addresses = {link: f"https://{link}.mine/" for link in ("dashboard_url", "console_url")}
    rules = yaml.safe_load(with_links((RULES / "alerts.yaml").read_text(), addresses))["groups"]
    annotations = [rule["annotations"] for group in rules for rule in group["rules"]]
    links = sorted({(link, each[link]) for each in annotations for link in addresses if link in each})
    labels = {"cluster": "a b", "run_namespace": "team", "run": "ü/1 & 2", "rank": "3", "node": "n?", "instance": "n:1"}
    chosen = "var-run=%C3%BC%2F1+%26+2"
    where = "&var-run_namespace=team&var-cluster=a+b"
    expected = [
        "https://console_url.mine/?run=team%2F%C3%BC%2F1+%26+2",
        "https://console_url.mine/?run=team%2F%C3%BC%2F1+%26+2&rank=3",
        "https://dashboard_url.mine/d/rankscope-daemon",
        "https://dashboard_url.mine/d/rankscope-daemon?var-instance=n%3A1&var-cluster=a+b",
        "https://dashboard_url.mine/d/rankscope-daemon?var-node=n%3F&var-cluster=a+b",
        "https://dashboard_url.mine/d/rankscope-fleet",
        f"https://dashboard_url.mine/d/rankscope-job?{chosen}{where}",
        f"https://dashboard_url.mine/d/rankscope-rank?{chosen}&var-rank=3{where}",
    ]
    expression = "vector(1)"
    for name, value in labels.items():
        expression = f'label_replace({expression}, "{name}", "{value}", "", "")'
    linking = [
        {"alert": f"Link{number}", "expr": expression, "annotations": {name: link}}
        for number, (name, link) in enumerate(links)
    ]
    (tmp_path / "links.yaml").write_text(json.dumps({"groups": [{"name": "links", "rules": linking}]}))
    checks = [
        {
            "eval_time": "1m",
            "alertname": rule["alert"],
            "exp_alerts": [{"exp_labels": labels, "exp_annotations": dict.fromkeys(rule["annotations"], url)}],
        }
        for rule, url in zip(linking, expected, strict=True)
    ]
    tests = [{"interval": "15s", "input_series": [], "alert_rule_test": checks}]
    path = tmp_path / "test.yaml"
    path.write_text(json.dumps({"rule_files": ["links.yaml"], "evaluation_interval": "15s", "tests": tests}))
    tested = run("promtool", "test", "rules", str(path))
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_the_rules_find_what_the_detector_finds(tmp_path: Path) -> None:
    """The same cases as tests.unit.analysis.verdicts.test_verdict_cases.py, in a Prometheus that adds labels of its own
    to what it scrapes and records."""
    order = copy_rules(tmp_path, set(ALERTS.values()), enforced=ENFORCED)
    document = {
        "rule_files": ["recording.yaml", "alerts.yaml"],
        "evaluation_interval": "15s",
        "group_eval_order": order,
        "tests": [promtool_test()],
    }
    path = tmp_path / "cases.yaml"
    path.write_text(json.dumps(document))
    tested = run("promtool", "test", "rules", str(path))
    assert tested.returncode == 0, tested.stdout + tested.stderr
