from __future__ import annotations

from dataclasses import fields

import pytest

from rankscope.daemon.collector import Supervised
from rankscope.daemon.sampler import COLLECTORS, Collectors, Sampler
from rankscope.daemon.samples import Problem
from rankscope.daemon.windows import window
from tests.unit.daemon import window_makers as make

RANKS = [make.rank(0), make.rank(1)]


def test_samples_and_problems_are_separated_and_timed() -> None:
    clock = make.FakeClock()

    def answer(rank: object) -> object:
        clock.sleep(0.25)
        return make.process() if rank is RANKS[0] else Problem("process", "gone", "the process ended")

    collected = Supervised(make.FakeSource("process", answer), monotonic=clock.monotonic_seconds).collect(
        RANKS, make.span()
    )
    assert list(collected.samples) == [RANKS[0].key]
    assert collected.problems[RANKS[1].key].kind == "gone"
    assert collected.status.success
    assert collected.duration_seconds == 0.5


def test_a_raising_collector_is_a_problem_of_every_rank() -> None:
    def fail(_: object) -> object:
        raise ValueError("a ring from the\nfuture")

    source = make.FakeSource("steps", fail)
    supervised = Supervised(source)
    collected = supervised.collect(RANKS, make.span())
    assert not collected.status.success
    assert {problem.kind for problem in collected.problems.values()} == {"crash"}
    assert "ValueError: a ring from the future" in collected.problems[RANKS[0].key].text
    source.answer = lambda _: make.process()
    assert supervised.collect(RANKS, make.span()).status.success


def test_a_failed_poll_is_charged_to_the_next_window() -> None:
    def broken_poll(now_monotonic: float) -> None:
        raise OSError("no more processes")

    source = make.FakeSource("stacks", lambda _: make.stacks())
    source.poll = broken_poll
    supervised = Supervised(source)
    supervised.poll()
    collected = supervised.collect(RANKS, make.span())
    assert collected.failure == "OSError: no more processes"
    assert len(collected.samples) == 2
    assert supervised.collect(RANKS, make.span()).status.success


def start(*names: str) -> Sampler:
    sources = tuple(make.FakeSource(name) for name in names)
    return Sampler(Collectors(make.FakeDiscovery(*RANKS), sources), make.FakeClock())


@pytest.mark.parametrize("forgotten", ["RankSamples", "PARTS"])
def test_a_collector_without_a_place_for_its_samples_is_refused(
    forgotten: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if forgotten == "PARTS":
        monkeypatch.delitem(window.PARTS, "network")
    name = "network" if forgotten == "PARTS" else "fans"
    with pytest.raises(ValueError, match=f"collector '{name}': {forgotten} has no '{name}'.*next step: add it"):
        start("steps", name)


def test_two_collectors_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="'steps' is registered twice"):
        start("steps", "process", "steps")


def test_every_registered_collector_has_its_place_in_a_window() -> None:
    places = {field.name for field in fields(window.RankSamples)} - {"problems"}
    assert {collector.name for collector in COLLECTORS} == places == set(window.PARTS)
