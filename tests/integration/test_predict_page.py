"""The page of `rankscope predict` in a browser: a prediction is selected without a script, in light and dark."""

from __future__ import annotations

from pathlib import Path

from rankscope.analysis.replay.prediction import forecast
from rankscope.analysis.replay.step_timeline import StepTimelines
from rankscope.cli.predict_page import make_page
from tests.unit.analysis.replay.made_steps import Machine
from tools.chromium import page

HOSTILE = "</title></svg><script>document.title='owned'</script><img src=https://example.org onerror=alert(1)>"
SHOWN = "[...document.querySelectorAll('.choice > figure')].map((one) => one.getBoundingClientRect().height > 0)"


def test_a_prediction_is_selected_with_mouse_and_keyboard(tmp_path: Path) -> None:
    machine = Machine()
    for step in range(4):
        began = machine.now
        machine.wait_for_input(500.0)
        for _ in range(50):
            machine.work(46.0)
            machine.launch(HOSTILE, 10.0)
        machine.annotate(f"ProfilerStep#{step}", began)
    timelines = StepTimelines()
    found = forecast({0: machine.trace()}, watch=timelines)
    path = tmp_path / "step.html"
    path.write_text(make_page(found, "headline", ["facts"], timelines))
    with page(tmp_path) as browser:
        for is_dark in (False, True):
            browser.open(path.as_uri(), is_dark=is_dark)
            assert browser.value(SHOWN) == [True, False, False]
            browser.click(*browser.center(".choice > label:nth-of-type(2)"))
            assert browser.value(SHOWN) == [False, True, False]
            browser.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight", windowsVirtualKeyCode=39)
            assert browser.value(SHOWN) == [False, False, True]
        assert browser.value("document.title") == "Rankscope prediction"
        assert browser.value("document.querySelectorAll('script, img').length") == 0
        assert browser.value(
            "[...document.querySelectorAll('rect > title')].some((t) => t.textContent.includes('</title>'))"
        )
        assert browser.problems() == []
