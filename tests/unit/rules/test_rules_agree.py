"""Alerts, their tests, runbooks, links and metrics say the same."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rankscope.analysis.verdicts.thresholds import AlertThresholds, Policy, table
from rankscope.analysis.verdicts.verdict import Kind
from rankscope.cli import kubectl, operator
from rankscope.daemon.config import Config
from tests.unit.daemon import test_metrics as exporting
from tests.unit.test_doc_commands import parse
from tools.generate_rules import fresh_files

ROOT = Path(__file__).resolve().parents[3]
RULES = ROOT / "rules"
SEVERITIES = {"critical", "warning", "info"}
SECTIONS = ("What it means", "Is it real", "Who", "What to do", "When to escalate")
PROMTOOL = re.compile(r"promtool query instant http://127\.0\.0\.1:9090 '[^'\n]+'")
ONLY_IN_KUBERNETES = ("RankscopeCertificateExpiring", "kubectl")
SAMPLES = {"RANK": "3"}  # of placeholders that are no names
# What every promtool test of an alert has to go through, as its names tell it.
BEHAVIOURS = ("healthy twin", "resolves", "missed scrape", "restart")


def groups(name: str) -> list[dict[str, Any]]:
    loaded: list[dict[str, Any]] = yaml.safe_load((RULES / name).read_text())["groups"]
    return loaded


ALERTS = [rule for group in groups("alerts.yaml") for rule in group["rules"]]
RECORDED = [rule for group in groups("recording.yaml") for rule in group["rules"]]
NAMES = sorted({rule["alert"] for rule in ALERTS})


def stems(folder: str, suffix: str) -> list[str]:
    return sorted(path.name.removesuffix(suffix) for path in (RULES / folder).iterdir())


def queries(rule: dict[str, Any]) -> str:
    """Everything that is PromQL in a rule, also in its texts."""
    texts = "\n".join(rule.get("annotations", {}).values())
    return "\n".join([rule["expr"], *re.findall(r'printf "([^}]*?(?:\{[^}]*\}[^}]*?)*)" \$', texts)])


def test_alerts_tests_and_runbooks_match_one_to_one() -> None:
    assert stems("tests", ".yaml") == NAMES
    assert stems("runbooks", ".md") == NAMES


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: f"{rule['alert']}-{rule['labels']['evidence']}")
def test_an_alert_keeps_the_conventions(rule: dict[str, Any]) -> None:
    assert re.fullmatch(r"Rankscope([A-Z][a-z]+)+", rule["alert"])
    labels, annotations = rule["labels"], rule["annotations"]
    assert labels["severity"] in SEVERITIES
    assert labels.keys() <= {"severity", "evidence", "capture"}
    assert labels.get("capture", "true") == "true"
    assert not [text for text in annotations.values() if "://" in text], "nobody knows the reader's addresses"
    assert annotations["summary"] and re.search("GPU-hour|los[et]", annotations["description"]), "what does it cost?"
    # A failed scrape ends every series of its target: an instant of a scraped metric would fire or resolve on it.
    scraped = re.findall(r"(?<![:\w])rankscope_\w+(?:\{[^}]*\})?(?!\w)(?!\{)(\[)?", rule["expr"])
    assert all(scraped), f"{rule['alert']} reads an instant of a scraped metric"


def test_numbers_to_compare_with_come_from_the_table_of_thresholds() -> None:
    thresholds = {rule["record"] for rule in RECORDED if rule["record"].startswith("rankscope:threshold:")}
    used = set(re.findall(r"rankscope:threshold:\w+", "\n".join(rule["expr"] for rule in ALERTS + RECORDED)))
    assert used == thresholds
    named = set(re.findall(r"`(rankscope:threshold:\w+)`", (ROOT / "docs" / "alerts.md").read_text()))
    assert named <= thresholds
    assert {path.name for path, text in fresh_files().items() if path.read_text() != text} == set(), "make rules"


def test_a_threshold_that_a_rule_reads_has_one_default() -> None:
    assert not {one.name for one in table(Policy)} & {one.name for one in table(AlertThresholds)}


def test_rules_name_existing_verdicts_and_every_finding_has_an_alert() -> None:
    text = "\n".join(rule["expr"] for rule in ALERTS)
    matchers = re.findall(r'verdict(?:=~|=|!=)"([a-z_|]+)"', text)
    named = {name for matcher in matchers for name in matcher.split("|")}
    assert named <= {kind.value for kind in Kind}
    # Low MFU is judged by its target: of jobs without a verdict too.
    assert {kind.value for kind in Kind if kind.is_finding} - named == {Kind.LOW_MFU.value}


def test_recorded_series_follow_the_naming_scheme_and_cover_every_read() -> None:
    recorded = {rule["record"] for rule in RECORDED}
    assert all(re.fullmatch(r"\w+:rankscope_\w+:\w+|rankscope:threshold:\w+", name) for name in recorded)
    read = set(re.findall(r"\w+:\w+:\w+", "\n".join(queries(rule) for rule in ALERTS + RECORDED)))
    assert read <= recorded


def test_every_metric_that_is_read_is_exported_or_agreed_on() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    sources = "\n".join(
        path.read_text() for root in ("daemon", "operator") for path in (ROOT / root).glob("rankscope/**/*export*.py")
    )
    read = set()
    for rule in ALERTS + RECORDED:
        read |= set(re.findall(r"(?<![:\w])rankscope_\w+(?!\w*:)", queries(rule)))
    unknown = {
        name
        for name in read
        if f"`{name}`" not in page and name.removeprefix("rankscope_").removesuffix("_total") not in sources
    }
    assert not unknown


def test_rank_and_gpu_series_in_rules_are_exported_by_default() -> None:
    status = replace(exporting.STATUS, metrics_detail=Config().metrics_detail)
    # Time in collectives by group is exported of ranks that do not know their self time.
    ranks = (exporting.full_rank(0), exporting.full_rank(1, without=("wait",)))
    exported = {name for name, _ in exporting.series(exporting.scrape(*ranks, status=status))}
    read = set(
        re.findall(r"(?<![:\w])rankscope_(?:rank|gpu)_\w+", "\n".join(rule["expr"] for rule in ALERTS + RECORDED))
    )
    assert len(read) > 15
    assert read <= exported


@pytest.mark.parametrize("name", NAMES)
def test_a_runbook_has_five_parts_a_query_and_a_command(name: str) -> None:
    text = (RULES / "runbooks" / f"{name}.md").read_text()
    title, *parts = re.split(r"^## ", text, flags=re.MULTILINE)
    assert title == f"# {name}\n\n"
    assert tuple(part.partition("\n")[0] for part in parts) == SECTIONS
    blocks = [re.findall(r"^```sh\n(.*?)\n```$", part, re.MULTILINE | re.DOTALL) for part in parts]
    assert [len(block) for block in blocks] == [0, 1, 1, 0, 0]
    assert PROMTOOL.fullmatch(blocks[1][0]), "one query"
    assert "#runbooks" in parts[1], "how to run it"
    assert parts[3].count("\n1. ") == 1
    assert " attach " in parts[4].lower(), "with which evidence"
    others = set(re.findall(r"\bRankscope[A-Z]\w+", text)) - set(NAMES)
    assert not others
    recorded = {rule["record"] for rule in RECORDED}
    assert (
        set(re.findall(r"\b\w+:rankscope_\w+:\w+|rankscope:threshold:\w+", text)) - {"run:rankscope_mfu_ratio:"}
        <= recorded
    )


@pytest.mark.parametrize("name", NAMES)
def test_who_is_asked_in_a_way_that_works_everywhere(name: str) -> None:
    """On one machine, through a context, and as `kubectl rankscope`, which knows fewer commands."""
    text = (RULES / "runbooks" / f"{name}.md").read_text()
    (who,) = re.findall(r"## Who\n\n```sh\n(.*)\n```\n", text)
    program, *words = who.split()
    assert program == "rankscope" or PROMTOOL.fullmatch(who) or (name, program) == ONLY_IN_KUBERNETES
    for command in [who] * (program == "rankscope") + re.findall(r"`(rankscope [^`]*)`", text):
        _, *words = command.split()
        parse([SAMPLES.get(word, word) for word in words])
        assert words[0] in {*kubectl.COMMANDS, "analyze", "mfu", "up"}, command


@pytest.mark.parametrize("name", NAMES)
def test_an_alert_is_tested_through_all_that_may_happen(name: str) -> None:
    document = yaml.safe_load((RULES / "tests" / f"{name}.yaml").read_text())
    told = " ".join(test["name"] for test in document["tests"])
    for behaviour in BEHAVIOURS:
        assert behaviour in told or (name, behaviour) == ("RankscopeDaemonDown", "missed scrape"), behaviour
    expected = [check for test in document["tests"] for check in test.get("alert_rule_test", ())]
    rules = {(rule["labels"]["severity"], rule["labels"]["evidence"]) for rule in ALERTS if rule["alert"] == name}
    seen = {
        (alert["exp_labels"]["severity"], alert["exp_labels"]["evidence"])
        for check in expected
        for alert in check["exp_alerts"]
    }
    assert seen == rules, "every rule of an alert has an example with its texts"


def test_the_tests_evaluate_every_rule_group_in_order() -> None:
    order = [group["name"] for group in groups("recording.yaml") + groups("alerts.yaml")]
    for name in NAMES:
        assert yaml.safe_load((RULES / "tests" / f"{name}.yaml").read_text())["group_eval_order"] == order


def test_the_documented_alert_table_has_every_alert_with_its_severities() -> None:
    text = (ROOT / "docs" / "alerts.md").read_text()
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| `Rankscope")]
    table = {cells[1].strip(" `"): cells[2] for cells in rows}
    assert sorted(table) == NAMES
    for name in NAMES:
        told = set(re.findall("critical|warning|info", table[name]))
        assert told == {rule["labels"]["severity"] for rule in ALERTS if rule["alert"] == name}, name


def test_alertmanager_knows_only_alerts_that_exist() -> None:
    text = (RULES / "alertmanager.example.yaml").read_text()
    for prefix, alternatives in re.findall(r'alertname=~"(Rankscope)\(([^)]*)\)(?!\.)"', text):
        assert {prefix + name for name in alternatives.split("|")} <= set(NAMES)
    assert set(re.findall(r'alertname="(\w+)"', text)) <= set(NAMES)


def test_a_hang_inhibits_alerts_on_verdicts_of_pace() -> None:
    hang = (RULES / "alertmanager.example.yaml").read_text().partition('alertname="RankscopeHang"')[2]
    (inhibited,) = re.findall(r"alertname=~\"Rankscope\(([^)]*)\)", hang.partition("equal:")[0])
    on_verdicts = {rule["alert"] for rule in ALERTS if rule["labels"].get("evidence") == "verdict"}
    absence = {"RankscopeRankMissing", "RankscopeTelemetryMissing"}  # which may be why it hangs
    assert on_verdicts - absence - {"RankscopeHang"} <= {f"Rankscope{name}" for name in inhibited.split("|")}


def test_the_example_posts_alerts_to_the_receiving_port() -> None:
    parser = argparse.ArgumentParser()
    operator.add_arguments(parser)
    text = (RULES / "alertmanager.example.yaml").read_text()
    assert f"http://{parser.get_default('alerts_listen')}/api/v1/alerts" in text
