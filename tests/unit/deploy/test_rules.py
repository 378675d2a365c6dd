"""Rules are about metrics that are exported, and lead to dashboards that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from deploy.grafana.dashboards import dashboards
from rankscope.cli.prometheus_stack import with_links
from tests.promql_reading import label_lists, runbook_queries, selectors
from tools.exported_metrics import exported_metrics

FOLDER = Path(__file__).resolve().parents[3] / "rules"
ADDED_BY_PROMETHEUS = {"instance", "cluster"}


ADDRESSES = {"runbook_url": "https://wiki.mine/", "dashboard_url": "https://g.mine/", "console_url": "https://c.mine"}


def rules() -> Iterator[dict[str, Any]]:
    for path in sorted(FOLDER.glob("*.yaml")):
        for group in yaml.safe_load(with_links(path.read_text(), ADDRESSES)).get("groups", ()):
            yield from group["rules"]


def test_every_rule_and_runbook_uses_exported_metrics_labels_and_values() -> None:
    metrics = exported_metrics()
    seen = set()
    asked = [(rule.get("alert") or rule["record"], rule["expr"]) for rule in rules()]
    asked += [(page.stem, query) for page, query in runbook_queries()]
    for name, expression in asked:
        for selector in selectors(expression):
            assert selector.metric in metrics, f"{name}: {selector.metric} is not exported"
            seen.add(selector.metric)
            labels = metrics[selector.metric].labels
            for matcher in selector.matchers:
                assert matcher.label in {*labels, *ADDED_BY_PROMETHEUS}, f"{name}: {selector.metric} {matcher}"
                if closed := labels.get(matcher.label):
                    assert set(matcher.words) <= set(closed), f"{name}: {selector.metric} {matcher}"
    assert len(seen) > 20


def test_every_rule_keeps_a_runs_cluster_and_namespace() -> None:
    for rule in rules():
        for text in (rule["expr"], *rule.get("annotations", {}).values()):
            for labels in label_lists(text):
                assert not labels & {"job", "namespace", "pod"}, text
                assert "run" not in labels or "run_namespace" in labels, text
                assert "cluster" in labels or text != rule["expr"], text


def test_every_recorded_series_that_a_rule_reads_is_recorded() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for rule in rules():
        read = set(re.findall(r"\b[a-z_]+:rankscope_\w+:\w+|\brankscope:\w+:\w+", rule["expr"]))
        assert read <= recorded, rule.get("alert") or rule["record"]


def test_alerts_link_to_their_runbook_and_to_the_console() -> None:
    for links in (rule["annotations"] | {"alert": rule["alert"]} for rule in rules() if "alert" in rule):
        assert links["runbook_url"] == f"https://wiki.mine/{links['alert']}.md"
        assert links["dashboard_url"].startswith("https://g.mine/d/")
        assert ("console_url" in links) == ("var-run=" in links["dashboard_url"])
        assert links.get("console_url", "https://c.mine/?run=").startswith("https://c.mine/?run=")


def test_every_alert_links_to_a_dashboard_with_its_variables() -> None:
    variables = {made["uid"]: {v["name"] for v in made["templating"]["list"]} for made in dashboards().values()}
    for rule in rules():
        if "alert" in rule:
            link = re.search(r"/d/([\w-]+)(?:\?(.*))?$", rule["annotations"]["dashboard_url"])
            assert link is not None, rule["alert"]
            assert set(re.findall(r"var-(\w+)=", link[2] or "")) <= variables[link[1]], rule["alert"]
