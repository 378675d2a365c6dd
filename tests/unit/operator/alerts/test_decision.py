from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from rankscope.analysis.verdicts.verdict import Kind, Verdict
from rankscope.operator.alerts.alert import RefusedError, Wanted
from rankscope.operator.alerts.decision import AlertDecisions, FailedError, Limits
from rankscope.operator.correlation.correlator import JobState
from tests.unit.operator.alerts.notifications import HEALTHY, SLOW_NETWORK, alerts, entry, job
from tests.unit.operator.correlation.test_metrics import SLOW


class Played:
    """A desk whose captures are written down, on a clock of the test's."""

    def __init__(self, *states: JobState, limits: Limits | None = None) -> None:
        self.states = states or (job(),)
        self.now = 0.0
        self.started: list[Wanted] = []
        self.trouble: Exception | None = None
        self.start_seconds = 0.0
        self.desk = AlertDecisions(lambda: self.states, self._start, limits, lambda: self.now, lambda: 1000 + self.now)

    def _start(self, wanted: Wanted) -> str:
        if self.trouble is not None:
            raise self.trouble
        time.sleep(self.start_seconds)
        self.started.append(wanted)
        return f"c-{len(self.started)}"

    def __call__(self, *entries: dict[str, Any]) -> list[tuple[str, str]]:
        """What came of each, and why."""
        return [(outcome.result.value, outcome.text) for outcome in self.desk.handle(alerts(*entries))]

    def results(self, *entries: dict[str, Any]) -> list[str]:
        return [result for result, _ in self(*entries)]

    @property
    def ranks(self) -> list[tuple[int, ...]]:
        return [wanted.ranks for wanted in self.started]


def test_the_named_rank_is_captured_with_a_peer_and_reason() -> None:
    play = Played(job(replace(SLOW, culprits=(2,))))
    assert play(entry(rank="2")) == [("started", "capture c-1")]
    wanted = play.started[0]
    assert (wanted.job, wanted.reason) == ("j", "alert RankscopeStragglerRank")
    assert 2 in wanted.ranks
    assert len(wanted.ranks) == 2


def test_an_alert_without_a_rank_captures_the_verdicts_culprits() -> None:
    play = Played(job(replace(SLOW, culprits=(1, 3))))
    assert play.results(entry()) == ["started"]
    assert {1, 3} < set(play.ranks[0])
    assert len(play.ranks[0]) == 3


def test_where_nobody_is_accused_two_typical_ranks_are_captured() -> None:
    play = Played(job(SLOW_NETWORK))
    assert play.results(entry("RankscopeExposedCommunication")) == ["started"]
    assert len(play.ranks[0]) == 2


def test_hundreds_of_culprits_are_sampled() -> None:
    play = Played(job(replace(SLOW, culprits=tuple(range(300))), ranks=512))
    assert play.results(entry()) == ["started"]
    assert len(play.ranks[0]) == 8


def test_alerts_of_one_job_that_come_together_make_one_capture() -> None:
    play = Played(job(replace(SLOW, culprits=(1, 2))))
    assert play.results(entry(rank="1"), entry(rank="2"), entry("RankscopeLowMfu")) == ["started"] * 3
    assert len(play.started) == 1
    assert {1, 2} < set(play.ranks[0])
    assert play.started[0].reason == "alert RankscopeStragglerRank, RankscopeLowMfu"


def test_only_a_new_firing_makes_a_second_capture() -> None:
    play = Played()
    assert play.results(entry(rank="1")) == ["started"]
    play.now = 6 * 86400.0
    assert play.results(entry(rank="1")) == ["duplicate"]
    assert play.results(entry(rank="1", start=30)) == ["started"]


def test_a_resolved_alert_or_one_without_request_starts_no_capture() -> None:
    play = Played()
    assert play(entry(status="resolved"), entry(capture="false"), entry(capture="True")) == []
    assert play.started == []


def test_a_firing_during_a_jobs_rest_may_capture_later() -> None:
    play = Played()
    assert play.results(entry(rank="1")) == ["started"]
    play.now = 599.0
    assert play(entry("RankscopeLowMfu")) == [
        ("limited", "alerts have captured this job lately; the next may in 1 s"),
    ]
    play.now = 601.0
    assert play.results(entry("RankscopeLowMfu")) == ["started"]


@pytest.mark.parametrize("was_sampled", [False, True], ids=["not seen yet", "recorded as one of others"])
def test_one_newly_accused_rank_is_captured_while_the_job_rests(
    was_sampled: bool,
) -> None:
    play = Played(job(SLOW_NETWORK, ranks=16))
    assert play.results(entry("RankscopeExposedCommunication")) == ["started"]
    sampled = play.ranks[0]
    accused = sampled[0] if was_sampled else next(rank for rank in range(16) if rank not in sampled)
    assert play.results(entry("RankscopeLowMfu")) == ["limited"]
    assert play.results(entry(rank=str(accused))) == ["started"]
    assert play.results(entry("RankscopeHot", rank=str(accused))) == ["limited"]
    others = [rank for rank in range(16) if rank not in (*sampled, *play.ranks[1])]
    assert play.results(*(entry(rank=str(rank)) for rank in others)) == ["limited"] * len(others)


def test_all_jobs_together_draw_on_one_bucket() -> None:
    jobs = [job(name=f"job-{number}") for number in range(20)]
    play = Played(*jobs)
    flood = [entry(rank="1", run=each.job) for each in jobs]
    assert play.results(*flood) == ["started"] * 4 + ["limited"] * 16
    play.now = 299.0
    assert play.results(entry(rank="1", run="job-9")) == ["limited"]
    play.now = 301.0
    assert play.results(entry(rank="1", run="job-9"), entry(rank="1", run="job-10")) == ["started", "limited"]
    # However long it was quiet, no more than a burst.
    play.now = 1e6
    assert play.results(*(entry(rank="1", start=1, run=each.job) for each in jobs)).count("started") == 4


@pytest.mark.parametrize(
    ("labels", "why"),
    [
        ({"run": "another"}, "no run 'another' is known here; has it ended?"),
        ({"run": "j", "run_namespace": "team"}, "no run 'team/j' is known here; has it ended?"),
        ({"run": ""}, "the alert has no label 'run'"),
        ({"rank": "7"}, "the job has ranks 0 to 3, not 7"),
        ({"rank": "-1"}, "label 'rank' is no rank: '-1'"),
        ({"rank": "0; rm -rf /"}, "label 'rank' is no rank: '0; rm -rf /'"),
        ({"rank": "٣"}, "label 'rank' is no rank: '٣'"),
    ],
)
def test_what_is_not_there_is_refused_with_the_reason(labels: dict[str, str], why: str) -> None:
    play = Played()
    assert play(entry(**labels)) == [("refused", why)]
    assert play.started == []


def test_a_rank_that_no_longer_reports_is_refused() -> None:
    reporting = job(ranks=3)
    play = Played(replace(reporting, world_size=4))
    assert play(entry(rank="3")) == [("refused", "rank 3 does not report; has it ended?")]


def test_one_bad_alert_does_not_cost_the_others_their_capture() -> None:
    play = Played()
    assert play.results(entry(rank="99"), entry(rank="1")) == ["refused", "started"]
    assert 1 in play.ranks[0]


def test_a_job_that_hangs_is_not_profiled() -> None:
    [(result, why)] = Played(job(Verdict(Kind.HANG, "nobody moves", culprits=(1,))))(entry("RankscopeHang"))
    assert result == "refused"
    assert "stands still" in why


def test_a_late_alert_still_captures_the_rank_it_names() -> None:
    play = Played(job(HEALTHY))
    assert play.results(entry(rank="1")) == ["started"]
    assert 1 in play.ranks[0]


def test_an_alert_is_retried_after_an_unreachable_daemon() -> None:
    play = Played()
    play.trouble = FailedError("the daemon is away")
    assert play(entry(rank="1")) == [("failed", "the daemon is away")]
    play.trouble = None
    assert play.results(entry(rank="1")) == ["started"]


def test_what_the_daemon_refuses_is_told_and_spends_nothing() -> None:
    play = Played(limits=Limits(burst=1))
    play.trouble = RefusedError("rank 1 is being captured")
    assert play(entry(rank="1")) == [("refused", "rank 1 is being captured")]
    play.trouble = None
    assert play.results(entry(rank="1")) == ["started"]


def test_a_cluster_run_is_found_by_namespace_and_name() -> None:
    play = Played(job(name="other/llama"), job(name="team/llama"))
    assert play.results(entry(rank="1", run="llama", run_namespace="team")) == ["started"]
    assert play.started[0].job == "team/llama"
    assert play.results(entry(rank="1", run="llama")) == ["refused"]


def test_a_job_is_found_by_its_shortened_label() -> None:
    play = Played(job(name="x" * 300))
    assert play.results(entry(rank="1", run="x" * 127 + "…")) == ["started"]
    assert play.started[0].job == "x" * 300


def test_outcomes_of_alerts_are_counted_and_the_recent_ones_kept() -> None:
    play = Played()
    play(entry(rank="1"))
    play(*(entry("Odd\n\x1b[2J", rank="99", start=number % 60) for number in range(500)))
    assert {result.value: count for result, count in play.desk.totals().items()} == {
        "started": 1,
        "duplicate": 0,
        "limited": 0,
        "refused": 500,
        "failed": 0,
    }
    assert len(play.desk.recent) == 100
    assert all(outcome.alert.isprintable() for outcome in play.desk.recent)


def test_another_replicas_job_is_retried_and_an_unknown_is_refused() -> None:
    play = Played()
    play.desk = AlertDecisions(lambda: play.states, play._start, is_elsewhere=lambda job: job == "theirs")
    assert play(entry(run="theirs")) == [("failed", "another replica has this job")]
    assert play.results(entry(run="nobodys")) == ["refused"]
    assert play.results(entry(rank="99")) == ["refused"]
