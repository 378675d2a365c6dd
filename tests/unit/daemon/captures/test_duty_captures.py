"""Which ranks the duty cycle may record, and by what."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rankscope.daemon.captures import duty_cycle
from rankscope.daemon.captures.duty_cycle import DutyCaptures
from tests.unit.daemon import window_makers as make

RANK = make.rank()


def desk(kineto: bool, probe: bool, client: object = None) -> DutyCaptures:
    def backend(able: bool) -> Any:
        return SimpleNamespace(objection=lambda rank: None if able else "not possible")

    nothing: Any = None
    endpoint: Any = SimpleNamespace(client=lambda pid: client)
    return DutyCaptures(nothing, nothing, backend(kineto), backend(probe), endpoint, Path("/proc"))


READY, PROFILING = SimpleNamespace(is_ready=True), SimpleNamespace(is_ready=False)


@pytest.mark.parametrize(
    ("kineto", "probe", "client", "able", "objection"),
    [
        (True, False, READY, True, None),
        (True, False, PROFILING, True, "profiler"),
        (True, False, None, True, "unable"),
        (True, True, None, True, "unable"),  # it would be asked first, and does not answer
        (False, True, None, True, None),
        (False, False, None, False, "unable"),
    ],
)
def test_a_rank_is_recorded_by_libkineto_or_its_probe(
    kineto: bool, probe: bool, client: object, able: bool, objection: str | None
) -> None:
    captures = desk(kineto, probe, client)
    assert captures.is_able(RANK) is able
    assert captures.objection(RANK) == objection


@pytest.mark.parametrize(("kineto", "probe"), [(True, False), (False, True)])
def test_a_rank_that_a_capture_slows_permanently_is_left_alone(
    kineto: bool, probe: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duty_cycle, "slowdown_objection", lambda *_: "without TEARDOWN_CUPTI=1")
    assert desk(kineto, probe, READY).objection(RANK) == "slowdown"
