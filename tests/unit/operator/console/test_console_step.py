"""The picture of one step, as the console's API sends it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jsonschema
import msgspec
import numpy as np
import pytest

from rankscope.analysis.step_graph import step_picture
from rankscope.analysis.step_graph.path_windows import PathFinder
from rankscope.analysis.step_graph.recording import read_recording
from rankscope.analysis.step_graph.step_picture import Bars, StepPicture, draw_step
from rankscope.operator.console.answers import StepPictureAnswer
from rankscope.operator.console.api import DOCUMENT
from rankscope.operator.console.step_view import step_answer
from tests.support.step_programs import Layout, play
from tests.unit.operator.console.test_console_api import ask, served
from tools.played_runs import RUN, Played

RECORDINGS = Path(__file__).parents[3] / "data" / "nccl"


def picture_of(name: str, *culprits: int) -> StepPicture:
    finder = PathFinder()
    for _ in finder.find_all(read_recording(RECORDINGS / f"{name}.npz").operations):
        pass
    assert finder.judged is not None
    return draw_step(finder.judged, culprits)


@pytest.fixture(scope="module")
def late() -> StepPicture:
    return picture_of("pp2_dp2_late_host", 2)


def answered(picture: StepPicture) -> StepPictureAnswer:
    played = Played()
    played.tick(picture=picture)
    answer = step_answer(played.view()).picture
    assert answer is not None
    return answer


def test_a_sentence_says_who_is_late_and_who_waits(late: StepPicture) -> None:
    answer = answered(late)
    assert answer.sentence == (
        "Rank 2 works 62.9 ms longer than its peers before this pipeline send; rank 0 waits for it and "
        "ranks 1 and 3 wait meanwhile."
    )
    assert answer.detail == (
        "Step 194 takes 340 ms, of which 247 ms would come back if rank 2 worked as its peers. Of its critical path, "
        "94 % is own work of ranks and 6 % is communication."
    )


def test_all_members_of_a_group_wait_for_the_late_rank() -> None:
    sentence = answered(picture_of("dp4_late_host", 2)).sentence
    assert sentence.endswith("before this data reduce_scatter of 4; ranks 0, 1 and 3 wait for it.")


def test_a_rank_without_peers_is_compared_with_its_past() -> None:
    assert "longer than earlier in the run before" in answered(picture_of("pp4_late_host", 2)).sentence


def test_the_sentence_of_a_healthy_job_accuses_nobody() -> None:
    answer = answered(picture_of("pp2_dp2_healthy"))
    assert answer.sentence.startswith("Step 469 takes 96.3 ms. Of its critical path, 80 % is own work of ranks")
    assert (answer.detail, answer.focus) == ("", None)


def test_what_is_left_out_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_picture, "MAX_BARS", 100)
    finder = PathFinder()
    finder.find(play(Layout(tensor=4, pipeline=2, data=4, steps=6)))
    assert finder.judged is not None
    note = answered(draw_step(finder.judged)).note
    assert note.startswith("Not drawn: 16 ranks and the ") and note.endswith(" shortest operations.")


def test_the_answer_is_what_the_document_says_in_few_bytes(late: StepPicture) -> None:
    played = Played()
    played.tick(picture=late)
    played.tick(run="bert", ranks=1)
    schema = {"$ref": "#/components/schemas/StepAnswer", "components": DOCUMENT["components"]}
    with served(played) as address:
        told, without = (ask(address, f"/api/v1/step?run={run}") for run in (RUN, "bert"))
    jsonschema.Draft202012Validator(schema).validate(told.json)
    assert without.json == {"run": "bert", "picture": None}
    assert len(told.body) < 10_000
    bars = told.json["picture"]["bars"]
    assert {len(column) for column in bars.values()} == {len(late.bars.row)}
    assert all(
        start <= arrived <= stop
        for start, arrived, stop in zip(bars["start_us"], bars["arrived_us"], bars["stop_us"], strict=True)
    )


def test_the_largest_picture_has_a_bounded_answer(late: StepPicture) -> None:
    """The numbers are as long as a daemon can make them."""
    many = np.full(step_picture.MAX_BARS, 10**18)
    few = np.full(step_picture.MAX_BARS, 10**7)
    bars = Bars(few, few, own_ns=many, start_ns=many, arrived_ns=many, stop_ns=many, bytes=many // 1000, awaited=few)
    assert len(msgspec.json.encode(answered(replace(late, bars=bars)))) < 400_000


def test_a_run_that_has_ended_keeps_its_last_picture(late: StepPicture) -> None:
    played = Played()
    played.tick()
    before = played.history.bytes
    played.tick(picture=late)
    assert played.history.bytes > before + late.size_bytes, "it counts for the memory of the history"
    played.end()
    answer = step_answer(played.view()).picture
    assert answer is not None
    assert answer.step == late.step
