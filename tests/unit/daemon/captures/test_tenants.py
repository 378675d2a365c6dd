from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from rankscope.daemon.captures.orders import fair_choice, surplus, tenant_of
from rankscope.daemon.captures.records import MAX_REMEMBERED_CAPTURES, Records
from rankscope.daemon.samples import RankProcess
from rankscope.v1 import capture_service_pb2 as pb

ITEMS = st.dictionaries(st.integers(0, 50), st.sampled_from("abc"))


def _rank(pid: int, pod: str | None = None) -> RankProcess:
    return RankProcess("job-7", 0, 0, 1, pid, 1, (pid,), pod=pod)


def test_a_tenant_is_a_pod_or_else_a_user(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "status").write_text("Name:\tx\nUid:\t1001\t0\t0\t0\n")
    assert tenant_of(_rank(7, "0a-1b"), tmp_path) == "pod 0a-1b"
    assert tenant_of(_rank(7), tmp_path) == "uid 1001"
    assert tenant_of(_rank(8), tmp_path) == "job job-7"  # has just ended


def test_the_oldest_of_the_tenant_that_has_most_goes_first() -> None:
    tenants = {1: "few", 2: "many", 3: "many", 4: "many", 5: "other"}
    assert surplus([1, 2, 3, 4, 5], tenants.__getitem__, 3) == [2, 3]
    assert surplus([1, 2, 3], tenants.__getitem__, 3) == []


@given(ITEMS, st.integers(0, 30), st.sets(st.integers(0, 50)))
def test_left_out_tenants_have_at_most_one_item_fewer(items: dict[int, str], limit: int, incumbents: set[int]) -> None:
    chosen = fair_choice(items, limit, incumbents)
    assert len(chosen) == min(limit, len(items)) and chosen <= items.keys()
    counts = {tenant: sum(items[one] == tenant for one in chosen) for tenant in "abc"}
    left_out = {items[one] for one in items.keys() - chosen}
    assert all(counts[tenant] >= max(counts.values()) - 1 for tenant in left_out)


@given(ITEMS, st.integers(0, 30))
def test_a_choice_is_stable_when_one_tenant_adds_more(items: dict[int, str], limit: int) -> None:
    chosen = fair_choice(items, limit, ())
    assert fair_choice(items, limit, chosen) == chosen
    more = {**items, **dict.fromkeys(range(100, 120), "a")}
    counts = {tenant: sum(items[one] == tenant for one in chosen) for tenant in "abc"}
    kept = fair_choice(more, limit, chosen)
    assert all(one in kept for one in chosen if counts[items[one]] <= counts["a"])


def test_captures_of_the_tenant_with_most_are_forgotten_first() -> None:
    tenants = {"the-only-one": "pod few"}
    records = Records(lambda capture: None, tenant=lambda capture_id: tenants.get(capture_id, "pod many"))
    records.add(pb.Capture(id="the-only-one", state=pb.CAPTURE_STATE_ANALYSED))
    for number in range(2 * MAX_REMEMBERED_CAPTURES):
        records.add(pb.Capture(id=f"m-{number}", state=pb.CAPTURE_STATE_FAILED))
    assert len(records.all()) == MAX_REMEMBERED_CAPTURES
    assert records.get("the-only-one") is not None and records.get("m-0") is None
