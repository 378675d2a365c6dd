"""The picture of one step on a run's page, in Chromium: of a real job of two stages in which rank 2 is late."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rankscope.analysis.step_graph.path_windows import PathFinder
from rankscope.analysis.step_graph.recording import read_recording
from rankscope.analysis.step_graph.step_picture import StepPicture, draw_step
from rankscope.analysis.verdicts.verdict import Kind, Severity, Verdict
from tests.console.serving import ROOT, TEXT, press, serious_findings, served_to
from tools.chromium import Page
from tools.played_runs import RUN, Played

CANVAS = ".step canvas"
VERDICT = Verdict(Kind.SLOW_RANK, "", Severity.ALARM, culprits=(2,), impact_ratio=0.73)
SENTENCE = "Rank 2 works 62.9 ms longer than its peers before this pipeline send; rank 0 waits for it"
READING = "document.querySelector('.step .reading').innerText"
TIP = "document.querySelector('.step .tip')?.innerText"
ENDS = "[...document.querySelectorAll('.step .ends span')].map((one) => one.innerText)"
# The share of the pixels of a row that have this colour, within a few units.
SHARE = """(() => {
  const canvas = document.querySelector('.step canvas'), [row, rows, colour] = [%d, %d, %s];
  const copy = new OffscreenCanvas(canvas.width, 1).getContext('2d', { willReadFrequently: true });
  copy.drawImage(canvas, 0, -Math.floor((row + 0.3) * canvas.height / rows));
  const data = copy.getImageData(0, 0, canvas.width, 1).data;
  const isAlike = (_, at) => [0, 1, 2].every((part) => Math.abs(data[4 * at + part] - colour[part]) < 8);
  return Array.from({ length: canvas.width }).filter(isAlike).length / canvas.width;
})()"""
LATE = (217, 72, 15)


@pytest.fixture(scope="module")
def pictures() -> dict[str, StepPicture]:
    """The late rank in two windows, and a window of the healthy twin."""
    drawn = {}
    for name, culprits in (("pp2_dp2_late_host", (2,)), ("pp2_dp2_healthy", ())):
        finder = PathFinder()
        recording = read_recording(ROOT / "tests" / "data" / "nccl" / f"{name}.npz")
        for number, _ in enumerate(finder.find_all(recording.operations)):
            assert finder.judged is not None
            drawn[f"{name} {number}"] = draw_step(finder.judged, culprits)
    late = [picture for name, picture in drawn.items() if "late" in name]
    return {"late": late[-1], "earlier": late[-2], "healthy": drawn[name + " 3"]}


@pytest.fixture
def played(pictures: dict[str, StepPicture]) -> Played:
    played = Played()
    for _ in range(3):
        played.tick(verdict=VERDICT, picture=pictures["late"])
    return played


@pytest.fixture
def shown(page: Page, played: Played) -> Iterator[Page]:
    with served_to(page, played) as console:
        page.open(f"{console.url}?run={RUN}", 1280, 900)
        page.wait_for(f"document.querySelector('{CANVAS}')?.width > 300")
        page.wait_for("document.querySelector('.phases') !== null")
        yield page


def late_share(page: Page, row: int) -> float:
    share: float = page.value(SHARE % (row, 4, list(LATE)))
    return share


def test_the_late_operation_is_seen_before_the_whole_step(shown: Page) -> None:
    page = shown
    assert page.value(f"{TEXT}.includes({SENTENCE!r})")
    assert late_share(page, 2) > 0.4
    assert [late_share(page, row) for row in (0, 1, 3)] == [0, 0, 0]
    assert page.value("document.querySelector('.step .ranks .late').innerText").endswith("rank 2")
    first = page.value(ENDS)
    press(page, "Whole step")
    page.wait_for(f"{ENDS}[0] === '0 s'")
    assert (first[0], page.value(ENDS)[-1]) == ("204 ms", "340 ms")
    press(page, "Late operation")
    page.wait_for(f"{ENDS}[0] === '204 ms'")


def test_a_bar_under_the_pointer_says_who_is_awaited(shown: Page) -> None:
    page = shown
    left, top, width, height = box(page)
    page.point(left + 0.4 * width, top + 0.9 * height)
    page.wait_for(f"{TIP}?.startsWith('rank 3: data all_reduce of 2, ')")
    tip = page.value(TIP)
    assert "; waits " in tip and " for rank 2, then " in tip
    page.point(left + 0.6 * width, top + 0.6 * height)
    page.wait_for(f"{TIP}?.startsWith('rank 2: own work for 75.4 ms, 62.9 ms longer than usual')")


def box(page: Page) -> tuple[float, float, float, float]:
    left, top, width, height = page.value(
        f"(() => {{ const one = document.querySelector('{CANVAS}'); one.scrollIntoView({{block: 'center'}});"
        "const box = one.getBoundingClientRect(); return [box.left, box.top, box.width, box.height]; })()"
    )
    return left, top, width, height


def test_it_can_be_read_and_zoomed_without_a_pointer(shown: Page) -> None:
    page = shown
    page.value(f"document.querySelector('{CANVAS}').focus()")
    page.press("ArrowRight")
    page.wait_for(f"{READING}.startsWith('rank 2: pipeline send')")
    page.press("ArrowDown")
    page.wait_for(f"{READING}.startsWith('rank 3: ')")
    begin = page.value(ENDS)[0]
    page.type("+")
    page.wait_for(f"{ENDS}[0] !== {begin!r}")
    page.press("Escape")
    page.wait_for(f"{ENDS}[0] === '0 s' && {ENDS}[4] === '340 ms'")
    page.press("ArrowRight")
    page.press("Enter")
    page.wait_for("document.querySelector('h1').innerText.startsWith('Rank ')")


def test_a_newer_step_waits_while_a_part_is_shown(
    shown: Page, played: Played, pictures: dict[str, StepPicture]
) -> None:
    page = shown
    newer = replace(pictures["earlier"], step=pictures["late"].step + 5)
    label = f"document.querySelector('{CANVAS}').ariaLabel"
    assert page.value(label).startswith("Step 194 of 4 ranks")
    left, top, width, height = box(page)
    page.drag((left + 0.3 * width, top + height / 2), (left + 0.6 * width, top + height / 2))
    page.wait_for(f"{ENDS}[0] !== '204 ms'")
    zoomed = page.value(ENDS)
    played.tick(verdict=VERDICT, picture=newer)
    page.wait_for(f"{TEXT}.includes('Show the newest step')")
    assert page.value(ENDS) == zoomed
    assert page.value(label).startswith("Step 194 of 4 ranks")
    press(page, "Show the newest step")
    page.wait_for(f"{label}.startsWith('Step 199 of 4 ranks')")
    played.tick(verdict=VERDICT, picture=pictures["late"])
    page.wait_for(f"{label}.startsWith('Step 194 of 4 ranks')")


def test_the_wheel_zooms_only_once_the_picture_is_chosen(shown: Page) -> None:
    page = shown
    left, top, width, height = box(page)
    middle = {"x": left + width / 2, "y": top + height / 2}
    turn = {"type": "mouseWheel", "deltaX": 0, "deltaY": -100, **middle}
    page.call("Input.dispatchMouseEvent", **turn)
    page.click(middle["x"], middle["y"])
    assert page.value(ENDS)[0] == "204 ms"
    left, top, width, height = box(page)
    page.call("Input.dispatchMouseEvent", **turn | {"y": top + height / 2})
    page.wait_for(f"{ENDS}[0] !== '204 ms'")


def test_nobody_is_accused_on_a_healthy_run(page: Page, pictures: dict[str, StepPicture]) -> None:
    played = Played()
    played.tick(picture=pictures["healthy"])
    with served_to(page, played) as console:
        page.open(f"{console.url}?run={RUN}", 1280, 900)
        page.wait_for(f"document.querySelector('{CANVAS}')?.width > 300")
        page.wait_for(f"{TEXT}.includes('Of its critical path, ')")
        assert [late_share(page, row) for row in range(4)] == [0, 0, 0, 0]
        assert page.value("document.querySelector('.step .late')") is None
        assert not page.value(f"{TEXT}.includes('Late operation')")


def test_a_run_not_judged_by_its_path_has_none(page: Page) -> None:
    played = Played()
    for _ in range(3):
        played.tick()
    with served_to(page, played) as console:
        page.open(f"{console.url}?run={RUN}", 1280, 900)
        page.wait_for("document.querySelector('.heatmap canvas')?.width > 300")
        page.wait_for("performance.getEntriesByType('resource').some(({ name }) => name.includes('/step?'))")
        assert page.value("document.querySelector('.step')") is None


@pytest.mark.parametrize("variant", ["light", "dark", "narrow"])
def test_the_picture_is_accessible_and_fits(variant: str, page: Page, played: Played, tmp_path: Path) -> None:
    """Its picture is written to RANKSCOPE_SCREENSHOTS, if that names a folder."""
    with served_to(page, played) as console:
        page.open(f"{console.url}?run={RUN}", 400 if variant == "narrow" else 1280, 900, variant == "dark")
        page.wait_for(f"document.querySelector('{CANVAS}')?.width > 150")
        page.screenshot(Path(os.environ.get("RANKSCOPE_SCREENSHOTS", tmp_path)) / f"step-{variant}.png")
        left, top, width, height = box(page)
        page.point(left + 0.45 * width, top + 0.6 * height)
        page.wait_for(f"{TIP}?.startsWith('rank 2: ')")
        assert page.value("document.documentElement.scrollWidth <= innerWidth")
        assert serious_findings(page) == []
