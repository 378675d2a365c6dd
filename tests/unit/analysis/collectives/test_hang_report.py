from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from rankscope.analysis.collectives.flight_recorder.tail import make_tail
from rankscope.analysis.collectives.hang_report import (
    MAX_PLACES,
    CollectiveRow,
    Evidence,
    Gap,
    HangReport,
    make_hang_report,
)
from rankscope.analysis.verdicts.verdict import ENDED, Cause, Kind, Severity, Verdict
from tests.unit.analysis.collectives.flight_recorder.made_dumps import as_json, content, hung_job, record

VERDICT = Verdict(Kind.HANG, "no rank has advanced for 35 s", Severity.ALARM, culprits=(17,))
TORCH = "/usr/lib/python3/site-packages/torch/distributed/distributed_c10d.py"
WAITS = (f"all_reduce ({TORCH}:99)", "main (/app/train.py:118)")
SAVES = ("save_checkpoint (/app/ckpt.py:51)", "main (/app/train.py:203)")


def made(evidence: Evidence, verdict: Verdict = VERDICT) -> HangReport:
    report = make_hang_report("h-1", "llama", verdict, 64, 1000.0, 1035.0, evidence)
    assert msgspec.json.decode(msgspec.json.encode(report), type=HangReport) == report
    return report


def test_one_sentence_names_the_collective_and_the_absent_ranks_location() -> None:
    stacks = {rank: SAVES if rank == 17 else WAITS for rank in range(64)}
    report = made(Evidence(stacks, records={rank: make_tail(dump) for rank, dump in hung_job().items()}))
    assert report.headline == (
        "63 ranks in all_reduce seq 1041 of group 0 (default_pg), rank 17 in save_checkpoint (ckpt.py:51)"
    )
    odd, rest = report.places
    assert (odd.ranks, odd.stack) == ("17", SAVES)
    assert (rest.ranks, rest.count, rest.place) == ("0-16,18-63", 63, "all_reduce (train.py:118)")
    named = "all_reduce seq 1041 of group 0 (default_pg)"
    assert [row for row in report.collectives if row.collective == named] == [
        CollectiveRow(named, "0-16,18-63", "waits", report.collectives[0].detail),
        CollectiveRow(named, "17", "never entered", "last in barrier seq 3 of group 1 (ckpt)"),
    ]
    assert (report.gaps, report.seconds) == ((), 35.0)


def of_two(one: dict[str, Any], other: dict[str, Any]) -> HangReport:
    """Two ranks whose last record differs."""
    ranks = {rank: [record(1), record(2, state="scheduled", **last)] for rank, last in enumerate((one, other))}
    tails = {rank: make_tail(as_json(content(each, {"0": range(2)}))) for rank, each in ranks.items()}
    return made(Evidence({0: WAITS, 1: WAITS}, records=tails))


def test_different_sizes_types_and_operations_are_named() -> None:
    for one, other, words in (
        ({"sizes": [[8]]}, {"sizes": [[9]]}, "different sizes"),
        ({"dtype": "Float"}, {"dtype": "Half"}, "different dtypes"),
        ({"operation": "nccl:all_reduce"}, {"operation": "nccl:broadcast"}, "different operations"),
    ):
        report = of_two(one, other)
        assert report.headline.startswith(f"{words} in seq 2"), report.headline
        assert [(row.ranks, row.finding) for row in report.collectives[:2]] == [("0", words), ("1", words)]


def test_the_minority_rank_is_the_culprit_and_callers_are_named() -> None:
    """As NCCL recorded it: the small collective ends on the ranks that agree, the large one never does."""
    agreed = [record(1), record(2, sizes=[[16]])]
    large = [record(1), record(2, sizes=[[1 << 22]], state="scheduled"), record(3, state="scheduled")]
    ranks = dict.fromkeys(range(3), agreed) | {3: large}
    tails = {rank: make_tail(as_json(content(each, {"0": range(4)}))) for rank, each in ranks.items()}
    inside = (WAITS[0], "reduce_metrics (/app/metrics.py:7)", "main (/app/train.py:120)")
    stacks = dict.fromkeys(range(3), inside) | {3: ("main (/app/train.py:121)",)}
    verdict = Verdict(Kind.HANG, "all ranks wait for each other", Severity.ALARM)
    report = made(Evidence(stacks, records=tails), verdict)
    assert report.culprits == "3"
    assert report.headline.startswith(
        "different sizes in seq 2 of group 0 (default_pg): ranks 0-2 in all_reduce [16] Float"
    )
    assert report.headline.endswith("rank 3 in all_reduce [4194304] Float, ranks 0-2 in reduce_metrics (metrics.py:7)")


def test_a_rank_in_another_collective_differs_from_an_absent_one() -> None:
    groups = {"0": range(3), "ckpt": range(3)}
    waits = [record(1), record(2, state="scheduled")]
    elsewhere = [record(1), record(1, group="ckpt", state="scheduled")]
    ranks = {0: waits, 1: waits, 2: elsewhere}
    tails = {rank: make_tail(as_json(content(each, groups))) for rank, each in ranks.items()}
    found = {(row.ranks, row.finding) for row in made(Evidence({}, records=tails)).collectives}
    assert {("0-1", "waits"), ("2", "in another collective")} <= found


def test_without_recorders_the_headline_has_places_and_gaps_have_reasons() -> None:
    off = "the job was started without TORCH_FR_BUFFER_SIZE"
    report = made(Evidence({0: WAITS, 17: SAVES}, {3: "its node did not answer for it"}, {}, {0: off, 17: off}))
    assert report.headline == "rank 17 in save_checkpoint (ckpt.py:51), rank 0 in all_reduce (train.py:118)"
    assert report.gaps == (
        Gap("3", "stack", "its node did not answer for it"),
        Gap("0,17", "flight recorder", off),
    )


def test_ranks_that_left_are_named() -> None:
    ended = Verdict(Kind.HANG, "rank 1 ended", Severity.ALARM, culprits=(1,), cause=Cause(ENDED))
    report = made(Evidence({0: WAITS}, {1: "the rank does not report: has it ended?"}), ended)
    assert report.headline == "rank 1 left, rank 0 in all_reduce (train.py:118)"
    assert report.left == "1"


def test_without_any_evidence_the_verdict_is_the_sentence() -> None:
    report = made(Evidence({}, problems=["node-b: no answer\nwithin 20 s"]))
    assert (report.headline, report.problems) == (VERDICT.reason, ("node-b: no answer within 20 s",))


def test_a_report_of_as_many_places_as_ranks_is_bounded() -> None:
    frames = [f"{'f' * 5000}{number} (/app/{'d' * 5000}.py:{number})" for number in range(60)]
    stacks = {rank: [f"place {rank}", *frames] for rank in range(200)}
    reasons = {rank: f"{rank} {'x' * 5000}" for rank in range(200)}
    report = made(Evidence(stacks, reasons, {}, reasons, ["y" * 5000] * 200))
    assert len(msgspec.json.encode(report)) < 1 << 20
    assert len(report.places) == MAX_PLACES and "more places are left out" in report.problems[-1]


@given(st.dictionaries(st.integers(0, 70), st.binary() | st.just(make_tail(hung_job()[0])), max_size=4), st.text())
def test_garbage_in_tails_and_texts_makes_a_printable_report(tails: dict[int, bytes], text: str) -> None:
    hostile = f"\x1b[2J<script>\n{text}"
    report = made(Evidence({0: [hostile, f"{hostile} ({hostile}:1)"]}, {1: hostile}, tails, {2: hostile}, [hostile]))
    shown = [report.headline, *report.problems, *report.places[0].stack, *(gap.reason for gap in report.gaps)]
    assert all(one.isprintable() for one in shown)
    unreadable = [rank for rank, tail in tails.items() if tail[:1] != b"{"]
    assert sum(gap.reason == "its records cannot be read" for gap in report.gaps) == bool(unreadable)
