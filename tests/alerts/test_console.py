"""The console and a real Prometheus: older history, of series that promtool wrote, and links of alerts."""

from __future__ import annotations

import json
import os
import re
import struct
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import grpc
import numpy as np
import pytest
import yaml
from starlette.requests import Request
from starlette.types import ASGIApp

from rankscope.cli.prometheus_stack import find_rules, with_links
from rankscope.common.run_names import run_labels
from rankscope.operator.console.history import Values
from rankscope.operator.console.older_history import PrometheusHistory
from rankscope.operator.console.server import ConsoleServer
from rankscope.operator.console.signals import RUN_SIGNALS, SIGNALS
from tests.alerts.prometheus_running import Prometheus, backfill, running_prometheus
from tests.integration.daemon_process import Serving, serving
from tests.security.rank_processes import rank_processes, rank_variables
from tests.support.waiting import wait_until
from tools.played_runs import RUN, Played

HOURS = 7
QUERY_SECONDS = 120.0
SCRAPE_SECONDS = 30
SLOW_RANK, SLOW_SECONDS, USUAL_SECONDS, OTHERS_SECONDS = 3, 0.3, 0.1, 9.0
# What comes after the name is selected by its closing quote, if it is not escaped.
HOSTILE = 'team/x",run_namespace="other",run="llama"} or rankscope_rank_info{run="\\'
OTHER = "other/llama"  # of another namespace, with the same name
LINKED = (RUN, HOSTILE, "without kubernetes & more")
CLUSTERS = "team/twins"  # two clusters have one of this name


def backfilled(end: int) -> Iterator[str]:
    moments = range(end - HOURS * 3600, end + 1, SCRAPE_SECONDS)
    slow_until = end - 3 * 3600
    runs = {RUN: "", OTHER: "", HOSTILE: "", CLUSTERS: "east", CLUSTERS + "/": "west"}
    every = [
        ({**run_labels(run.rstrip("/")), "rank": str(rank)} | ({"cluster": cluster} if cluster else {}), run, rank)
        for run, cluster in runs.items()
        for rank in range(4)
    ]
    yield "# TYPE rankscope_rank_cause_seconds counter"
    for labels, run, rank in every:
        total = 0.0
        for moment in moments:
            is_slow = rank == SLOW_RANK and moment < slow_until
            own = OTHERS_SECONDS if run == OTHER else SLOW_SECONDS if is_slow else USUAL_SECONDS
            total += own * SCRAPE_SECONDS
            yield f"rankscope_rank_cause_seconds_total{{{text(labels | {'cause': 'self'})}}} {total} {moment}"
    yield "# TYPE rankscope_rank_steps counter"
    for labels, _, _ in every:
        steps = (f"{{{text(labels)}}} {number * SCRAPE_SECONDS} {moment}" for number, moment in enumerate(moments))
        yield from (f"rankscope_rank_steps_total{each}" for each in steps)
    yield "# TYPE rankscope_job_step_seconds gauge"
    for run in (RUN, OTHER):
        seconds = OTHERS_SECONDS if run == OTHER else 0.25
        yield from (f"rankscope_job_step_seconds{{{text(run_labels(run))}}} {seconds} {moment}" for moment in moments)
    yield "# EOF"


def text(labels: dict[str, str]) -> str:
    escaped = {name: value.replace("\\", "\\\\").replace('"', '\\"') for name, value in labels.items()}
    return ",".join(f'{name}="{value}"' for name, value in escaped.items())


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("older")
    backfill(folder, backfilled(int(time.time())))
    (folder / "rules.json").write_text(json.dumps({"groups": [{"name": "links", "rules": list(linking_rules())}]}))
    with running_prometheus(folder, {}, rules=[folder / "rules.json"]) as prometheus:
        yield prometheus


def linking_rules() -> Iterator[dict[str, Any]]:
    """Alerts that fire at once, with each link of the real ones."""
    (path,) = [path for path in find_rules().files if path.name == "alerts.yaml"]
    text = with_links(path.read_text(), {"console_url": "https://console.mine/"})
    real = [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]
    links = {rule["annotations"].get("console_url") for rule in real} - {None}
    assert len(links) == 2 and "console_url" not in yaml.safe_dump(yaml.safe_load(path.read_text()))
    for link in sorted(links):
        for run in LINKED:
            expression = "vector(1)"
            for name, value in {**run_labels(run), "rank": "2"}.items():
                expression = f'label_replace({expression}, "{name}", {json.dumps(value)}, "", "")'
            yield {"alert": "Linking", "expr": expression, "annotations": {"console_url": link}}


def test_an_alert_links_to_its_run_or_rank_page(prometheus: Prometheus) -> None:
    wait_until(lambda: len(prometheus.alerts()) == 2 * len(LINKED), lambda: str(prometheus.alerts()))
    opened = []
    with console(prometheus, *LINKED) as url:
        for alert in prometheus.alerts():
            link = urlsplit(alert["annotations"]["console_url"])
            assert (link.scheme, link.netloc, link.path) == ("https", "console.mine", "/")
            query = dict(parse_qsl(link.query))
            answer = json.loads(asked(url, "rank" if "rank" in query else "run", **query))
            opened.append((answer["run"], answer.get("rank")))
    assert sorted(opened, key=str) == sorted(((run, rank) for run in LINKED for rank in (2, None)), key=str)


class OnlyTeam:
    """A caller that may see one namespace."""

    def guarded(self, app: ASGIApp) -> ASGIApp:
        return app

    def authorize(self, request: Request, run: str) -> bool:
        return run != OTHER

    def channel(self, request: Request) -> grpc.Channel:
        raise AssertionError("no page of these tests has captures")


@contextmanager
def console(prometheus: Prometheus, *runs: str) -> Iterator[str]:
    """Of a process that has just begun: it has seen each run for a few seconds."""
    played = Played(begin=time.time() - 6)
    for run in runs * 3:
        played.tick(run=run, ranks=4, seconds=2 / len(runs))
    # A query of hours takes long on a busy machine.
    older = PrometheusHistory(prometheus.url + "/", request_seconds=QUERY_SECONDS)
    server = ConsoleServer(played.history, "127.0.0.1", 0, access=OnlyTeam(), older=older)
    server.start()
    try:
        yield server.url
    finally:
        server.stop()


def asked(url: str, path: str, **query: object) -> bytes:
    return fetched(f"{url}api/v1/{path}?{urlencode(query)}")


def fetched(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as answer:
        content: bytes = answer.read()
    return content


def heatmap(url: str, run: str, seconds: float, signal: str = "self_seconds") -> tuple[dict[str, Any], Values]:
    """With what Prometheus answers, or with the reason why not."""
    found: list[bytes] = []

    def is_read() -> bool:
        found[:] = [asked(url, "heatmap", run=run, signal=signal, since=-seconds, columns=400)]
        return b"is being read" not in found[0]

    wait_until(is_read, lambda: "Prometheus was not asked")
    (length,) = struct.unpack_from("<I", found[0])
    header = json.loads(found[0][4 : 4 + length])
    return header, np.frombuffer(found[0], "<f4", offset=4 + length).reshape(len(header["ranks"]), -1)


def answered(url: str, path: str, **query: object) -> dict[str, Any]:
    """The same, of a run or a rank."""
    answer: dict[str, Any] = {}

    def is_read() -> bool:
        answer.update(json.loads(asked(url, path, **query)))
        return "is being read" not in answer["pace" if path == "run" else "history"]["note"]

    wait_until(is_read, lambda: "Prometheus was not asked")
    return answer


def test_the_heat_map_shows_history_from_before_the_console_started(prometheus: Prometheus) -> None:
    for _ in range(2):  # the second one is a restart
        with console(prometheus, RUN) as url:
            header, matrix = heatmap(url, RUN, 6 * 3600)
            assert header["note"] == ""
            times, ranks = np.array(header["ends"]), header["ranks"]
            assert times[-1] - header["starts"][0] > 5.9 * 3600 and len(times) > 100
            lengths = times - np.array(header["starts"])
            assert lengths.max() < 1.5 * np.median(lengths)  # so marks are where they belong
            before = times < times[-1] - 3.5 * 3600
            slow, usual = matrix[ranks.index(SLOW_RANK)], matrix[ranks.index(0)]
            np.testing.assert_allclose(slow[before], SLOW_SECONDS, rtol=0.01)
            after = ~before & (times > times[-1] - 2.5 * 3600) & (times < times[-1] - 600)
            np.testing.assert_allclose(slow[after], USUAL_SECONDS, rtol=0.01)
            np.testing.assert_allclose(usual[before], USUAL_SECONDS, rtol=0.01)
            assert np.isclose(usual[-1], 0.09, atol=0.011)  # the newest is from memory


def test_a_restarted_up_shows_the_history_its_prometheus_kept(tmp_path: Path) -> None:
    name = f"older-{os.getpid()}"
    flags = ("--prometheus", "--prometheus-dir", str(tmp_path / "kept"), "--prometheus-interval", "2")
    with rank_processes(tmp_path) as processes:
        for rank in range(2):
            processes.start(rank_variables(rank, TORCHELASTIC_RUN_ID=name))
        with serving(tmp_path / "first", "up", *flags, "--console-listen", "127.0.0.1:0") as up:
            console, prometheus = address(up, "console"), address(up, "prometheus")
            query = urlencode(
                {"query": f'count(count_over_time(rankscope_rank_resident_bytes{{run=~".*{name}.*"}}[1m]) > 3)'}
            )
            wait_until(lambda: b'"2"' in fetched(f"{prometheus}/api/v1/query?{query}"), lambda: up.log)
            wait_until(lambda: run_called(console, name), lambda: up.log)
            run = run_called(console, name)
            wait_until(lambda: starts_of(console, run), lambda: up.log)
            begun = [starts_of(console, run)[0]]
        with serving(tmp_path / "second", "up", *flags, "--console-listen", "127.0.0.1:0") as up:
            console = address(up, "console")
            wait_until(lambda: run_called(console, name) == run, lambda: up.log)
            wait_until(lambda: starts_of(console, run), lambda: up.log)
            begun.append(starts_of(console, run)[0])
            shown: list[tuple[dict[str, Any], Values]] = []

            def has_older() -> bool:
                """Not at once, and not if a query has failed; then it is made again."""
                shown[:] = [heatmap(console, run, 300, "resident_bytes")]
                ((header, _),) = shown
                return bool(header["starts"]) and header["starts"][0] < begun[1] - 1 and header["note"] == ""

            wait_until(has_older, lambda: f"{shown[0][0]['note']}\n{up.log}")
            ((header, matrix),) = shown
            before = np.array(header["starts"]) < begun[1] - 1  # a column may reach into what is in memory
            assert begun[0] < begun[1]
            assert before.any() and (matrix[:, before] > 0).any(axis=1).all()


def starts_of(url: str, run: str) -> list[float]:
    """Of the history of rank 0; empty while there is none."""
    starts: list[float] = json.loads(asked(url, "rank", run=run, rank=0))["history"]["starts"]
    return starts


def run_called(url: str, name: str) -> str:
    runs = [each["run"] for each in json.loads(asked(url, "runs"))["runs"] if name in each["run"]]
    return runs[0] if runs else ""


def address(up: Serving, name: str) -> str:
    found = re.search(rf"\b{name} (http://[^\s,]+)", up.log)
    assert found is not None, up.log
    return found[1]


def test_runs_and_ranks_have_older_history_with_the_cohort_median(prometheus: Prometheus) -> None:
    with console(prometheus, RUN) as url:
        pace = answered(url, "run", run=RUN, since=-6 * 3600)["pace"]
        assert pace["ends"][-1] - pace["starts"][0] > 5.9 * 3600 and pace["begins_unix_seconds"] is None
        assert pace["series"][0]["values"][:20] == [0.25] * 20
        history = answered(url, "rank", run=RUN, rank=SLOW_RANK, since=-6 * 3600)["history"]
        own = next(one for one in history["series"] if one["signal"] == "self_seconds")
        np.testing.assert_allclose(own["values"][:20], SLOW_SECONDS, rtol=0.01)
        # Its stage has one other rank.
        np.testing.assert_allclose(own["cohort_median"][:20], (SLOW_SECONDS + USUAL_SECONDS) / 2, rtol=0.01)
        assert len(own["values"]) == len(history["ends"]) <= 180


def test_memory_alone_answers_where_it_is_enough(prometheus: Prometheus) -> None:
    with console(prometheus, RUN) as url:
        every = json.loads(asked(url, "rank", run=RUN, rank=0))["history"]
        newest = json.loads(asked(url, "rank", run=RUN, rank=0, since=every["ends"][-1] - 3))["history"]
        for history in (every, newest):
            assert history["ends"][-1] - history["starts"][0] < 10 and not history["note"]


def test_hostile_run_names_expose_no_series_of_another_namespace(prometheus: Prometheus) -> None:
    with console(prometheus, RUN, HOSTILE, OTHER) as url:
        for run in (RUN, HOSTILE):
            header, matrix = heatmap(url, run, 6 * 3600)
            assert header["note"] == "" and len(header["ends"]) > 100
            assert np.nanmax(matrix) < 1.1 * SLOW_SECONDS < OTHERS_SECONDS
            assert not json.loads(asked(url, "run", run=run))["pace"]["note"]
        for path, query in (("heatmap", {}), ("run", {}), ("rank", {"rank": 0})):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                asked(url, path, run=OTHER, since=-6 * 3600, **query)


def test_runs_of_two_clusters_with_one_name_are_not_mixed(prometheus: Prometheus) -> None:
    with console(prometheus, CLUSTERS) as url:
        header, matrix = heatmap(url, CLUSTERS, 6 * 3600)
        assert "several clusters (east, west)" in header["note"] and matrix.shape[1] <= 3


def test_prometheus_reads_the_promql_of_every_signal(prometheus: Prometheus) -> None:
    for signal in (*SIGNALS, *RUN_SIGNALS):
        if signal.promql:
            prometheus.query(signal.promql.replace("$window", "1m").replace("$run", 'run="x",rank=~"1|2"'))
