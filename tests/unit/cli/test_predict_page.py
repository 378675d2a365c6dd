"""The page of `rankscope predict --html`: what it says, and that nothing in a trace becomes markup."""

from __future__ import annotations

import json
import re
from pathlib import Path

from rankscope.analysis.replay.changes import CHANGES
from rankscope.analysis.replay.prediction import Forecast, forecast
from rankscope.analysis.replay.step_timeline import StepTimelines
from rankscope.analysis.traces.trace import Trace
from rankscope.cli.predict_page import MAX_AFTER, make_page
from tests.shared_data import H200
from tests.support.commands import Command
from tests.unit.analysis.replay.made_steps import Machine, device_bound, launch_bound
from tests.unit.cli.test_predict import delayed

HOSTILE = (
    "</title></svg><script>alert(1)</script><img src=https://example.org onerror=alert(1)>\x00\x1b[31m\ud800\u202e\"'&"
)
LAUNCH_BOUND = H200 / "launch_bound.json.gz"


def page_of(traces: dict[int, Trace], changes: str = "") -> tuple[Forecast, str]:
    by_name = {change.name: change for change in CHANGES}
    timelines = StepTimelines()
    wanted = [[by_name[word] for word in part.split("+")] for part in changes.split(",")] if changes else None
    found = forecast(traces, wanted, watch=timelines)
    return found, make_page(found, "what would be saved", ["facts"], timelines)


def test_the_page_has_predictions_and_a_step_for_each() -> None:
    found, page = page_of({0: launch_bound()}, "graph,input")
    assert "what would be saved" in page and "Facts." in page
    graph = found.predictions[0]
    assert graph.changes[0].remedy.replace("'", "&#x27;") in page and graph.changes[0].costs in page
    assert "<td>input</td><td>no step waits for its input</td>" in page
    assert page.count("<svg") == 2 and page.count('type="radio"') == 1
    assert "Before: step 1, 2.50 ms" in page and "With graph: step " in page
    assert f"−{100 * graph.gain:.1f} %</text>" in page
    assert "gemm: 10 µs at " in page and "(computation)" in page


def test_the_best_prediction_is_shown_first() -> None:
    _, page = page_of({0: launch_bound()}, "graph," + ",".join(["graph+graph"] * (MAX_AFTER + 3)))
    buttons = re.findall(r'<input type="radio"[^>]*>', page)
    assert len(buttons) == MAX_AFTER and [" checked" in button for button in buttons] == [True] + [False] * (
        MAX_AFTER - 1
    )
    assert "4 predictions with a smaller gain left out." in page


def test_nothing_to_gain_leaves_one_step() -> None:
    _, page = page_of({0: device_bound()}, "input")
    assert page.count("<svg") == 1 and 'type="radio"' not in page and "<h2>One step</h2>" in page


def test_hostile_names_stay_text() -> None:
    machine = Machine()
    for step in range(4):
        began = machine.now
        for number in range(300):
            machine.work(46.0)
            machine.launch(HOSTILE + str(number), 20.0, stream=2**62 + number % 9)
        machine.annotate(f"ProfilerStep#{step}", began)
    _, page = page_of({0: machine.trace()})
    assert "&lt;/title&gt;" in page
    assert not re.search(r"<script|<img|<a\b|http:|https://www|\x00|\x1b", page)
    assert "default-src 'none'" in page
    page.encode()


def test_a_page_stays_small() -> None:
    machine = Machine()
    for step in range(3):
        began = machine.now
        for number in range(1500):
            machine.launch(f"void kernel_{number}<{'int, ' * 50}>", 1.0, stream=number % 5)
        machine.annotate(f"ProfilerStep#{step}", began)
    _, page = page_of(dict.fromkeys(range(3), machine.trace()), "graph,even")
    assert page.count("<rect") < 2_100 * page.count("<svg")
    assert len(page) < 700_000 * page.count("<svg")


def test_the_command_writes_the_page_beside_its_answer(predict: Command, tmp_path: Path) -> None:
    path = tmp_path / "step.html"
    said = predict(LAUNCH_BOUND, "--step-ms", "14.75", "--html", path, "--json")
    assert said.status == 0 and json.loads(said.out)["usable"] and f"wrote {path}" in said.err
    page = path.read_text()
    assert page.startswith("<!doctype html>") and "Without the profiler the host takes 62" in page
    assert "With graph+fused: step " in page and "Before: step 4, 14.7 ms" in page


def test_what_does_not_replay_has_no_step_after(predict: Command, tmp_path: Path) -> None:
    path = tmp_path / "step.html"
    predict.answer(delayed(tmp_path / "trace.json.gz"), "--html", path, status=3)
    page = path.read_text()
    assert "Cannot be predicted." in page and "It drifts apart before stuck." in page
    assert "Recorded: step 1, 30 ms" in page and "Replayed: step 1, 10.0 ms" in page
    assert "With " not in page and 'type="radio"' not in page


def test_a_page_that_cannot_be_written_is_explained(predict: Command, tmp_path: Path) -> None:
    error = predict.complaint(LAUNCH_BOUND, "--html", tmp_path)
    assert str(tmp_path) in error and "next step: " in error
