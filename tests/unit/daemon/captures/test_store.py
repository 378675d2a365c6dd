from __future__ import annotations

import os
from collections import namedtuple
from pathlib import Path

import pytest

from rankscope.daemon.captures.orders import CaptureError
from rankscope.daemon.captures.store import LOST, MAX_CAPTURES, Kept, Quota, Store, Usage, captures_to_evict
from rankscope.v1 import capture_service_pb2 as pb

FIRST, SECOND, THIRD = (f"c-20261115-12000{second}-abcdef" for second in (0, 1, 2))
NOON = 1794744000.0  # of the ids above
GIGABYTE = 1 << 30
Disk = namedtuple("Disk", "total used free")
AMPLE = Disk(100 * GIGABYTE, 0, 100 * GIGABYTE)


def _store(folder: Path, disk: Disk = AMPLE, now: float = NOON + 60, **quota: float) -> Store:
    return Store(folder / "captures", Quota(**quota), lambda: now, lambda path: disk)  # type: ignore[arg-type]


def _finish(store: Store, capture_id: str, size_bytes: int = 1 << 20, rank: int = 0) -> None:
    path = store.workspace(capture_id).folder / "artifact"
    path.write_bytes(b"\0" * size_bytes)
    store.keep(capture_id, path, f"rank{rank}.json.gz")
    store.clean(capture_id)


def _has(store: Store, capture_id: str, rank: int = 0) -> bool:
    try:
        store.open(capture_id, rank)[0].close()
    except CaptureError:
        return False
    return True


def test_the_oldest_captures_make_room_when_the_quota_is_reached(tmp_path: Path) -> None:
    store = _store(tmp_path, total_bytes=2_500_000)
    for capture_id in (FIRST, SECOND, THIRD):
        _finish(store, capture_id)
    assert [_has(store, one) for one in (FIRST, SECOND, THIRD)] == [False, True, True]


def test_a_capture_over_the_quota_is_refused_without_evictions(tmp_path: Path) -> None:
    store = _store(tmp_path, total_bytes=2_500_000)
    _finish(store, FIRST)
    with pytest.raises(CaptureError, match=r"do not fit into the quota of 2500000 bytes, .* capture fewer steps or"):
        _finish(store, SECOND, 4 << 20)
    assert _has(store, FIRST) and not _has(store, SECOND)


def test_a_capture_with_a_callers_id_is_kept_and_reloaded(
    tmp_path: Path,
) -> None:
    store = _store(tmp_path, total_bytes=2_500_000)
    (tmp_path / "captures" / "models").mkdir()
    store.save(pb.Capture(id="k-0a1b", state=pb.CAPTURE_STATE_ANALYSED))
    os.utime(tmp_path / "captures" / "k-0a1b" / "capture.json", (NOON + 30, NOON + 30))
    for capture_id in ("k-0a1b", FIRST, SECOND, THIRD):
        _finish(store, capture_id)
    assert _has(store, "k-0a1b") and not _has(store, FIRST)  # the newest by the clock, not by name
    assert (tmp_path / "captures" / "models").is_dir()
    store.close()
    assert [capture.id for capture in _store(tmp_path).load()] == ["k-0a1b"]
    with pytest.raises(CaptureError, match="no capture"):
        store.workspace("../models")


def test_what_is_replaced_does_not_count_twice(tmp_path: Path) -> None:
    store = _store(tmp_path, total_bytes=1_500_000)
    _finish(store, FIRST)
    _finish(store, FIRST)
    assert _has(store, FIRST)


def test_a_capture_under_way_never_makes_room(tmp_path: Path) -> None:
    store = _store(tmp_path, total_bytes=1_500_000)
    _finish(store, FIRST)
    store.workspace(FIRST)
    with pytest.raises(CaptureError, match="quota"):
        _finish(store, SECOND)
    assert _has(store, FIRST)


def test_old_captures_go_by_themselves(tmp_path: Path) -> None:
    store = _store(tmp_path)
    _finish(store, FIRST)
    _finish(store, THIRD)
    store.close()
    later = _store(tmp_path, now=NOON + 61, age_seconds=60.0)
    later.sweep()
    assert not _has(later, FIRST) and _has(later, THIRD)


def test_nothing_is_recorded_onto_a_disk_that_is_almost_full(tmp_path: Path) -> None:
    store = _store(tmp_path, Disk(100 * GIGABYTE, 96 * GIGABYTE, 4 * GIGABYTE))
    with pytest.raises(CaptureError, match=r"the disk is almost full .* make room on it, or pass another"):
        store.workspace(FIRST)


def test_captures_go_until_others_have_their_part_of_the_disk() -> None:
    kept = [Kept(name, number, GIGABYTE, False) for number, name in enumerate("abc")]
    usage = Usage(100 * GIGABYTE, 4 * GIGABYTE, 10.0)
    going, objection = captures_to_evict(kept, usage, 0, Quota())
    assert [one.name for one in going] == ["a"] and objection is None


def test_little_captures_do_not_pile_up_without_end() -> None:
    kept = [Kept(f"{number}", number, 0, False) for number in range(MAX_CAPTURES + 2)]
    going, _ = captures_to_evict(kept, Usage(100, 100, 10.0), 0, Quota())
    assert {one.name for one in going} == {"0", "1"}


@pytest.mark.parametrize("capture_id", ["../../etc", "c-20261115-120000-abcdef/..", "", "c-20261115-120000-abcde\n"])
def test_an_id_that_is_none_of_ours_leads_nowhere(tmp_path: Path, capture_id: str) -> None:
    store = _store(tmp_path)
    for use in (store.workspace, store.clean, lambda one: store.open(one, 0)):
        with pytest.raises(CaptureError, match="no capture"):
            use(capture_id)


def test_a_crash_loses_running_captures_but_not_delivered_ones(tmp_path: Path) -> None:
    store = _store(tmp_path)
    running = pb.Capture(id=SECOND, job="j", state=pb.CAPTURE_STATE_RUNNING)
    running.ranks.add(rank=0, state=pb.CAPTURE_STATE_RUNNING)
    partly = pb.Capture(id=THIRD, job="j", state=pb.CAPTURE_STATE_WRITTEN)
    partly.ranks.add(rank=0, state=pb.CAPTURE_STATE_ANALYSED, artifact="rank0.json.gz")
    partly.ranks.add(rank=1, state=pb.CAPTURE_STATE_WRITTEN)
    for capture in (pb.Capture(id=FIRST, job="j", state=pb.CAPTURE_STATE_CANCELLED), running, partly):
        store.save(capture)
    (store.workspace(SECOND).folder / "rank0.json").write_bytes(b"{")
    store.close()

    known = {capture.id: capture for capture in _store(tmp_path).load()}

    assert list(known) == [FIRST, SECOND, THIRD]
    assert known[FIRST].state == pb.CAPTURE_STATE_CANCELLED and not known[FIRST].notes
    assert known[SECOND].state == pb.CAPTURE_STATE_FAILED
    assert known[SECOND].ranks[0].state == pb.CAPTURE_STATE_FAILED and known[SECOND].ranks[0].error == LOST
    assert not (tmp_path / "captures" / SECOND / "recording").exists()
    assert known[THIRD].state == pb.CAPTURE_STATE_ANALYSED and list(known[THIRD].notes) == [LOST]
    assert [rank.state for rank in known[THIRD].ranks] == [pb.CAPTURE_STATE_ANALYSED, pb.CAPTURE_STATE_FAILED]


def test_a_damaged_record_costs_only_itself(tmp_path: Path) -> None:
    store = _store(tmp_path)
    for capture_id in (FIRST, SECOND, THIRD):
        store.save(pb.Capture(id=capture_id, state=pb.CAPTURE_STATE_FAILED))
    (store.folder / FIRST / "capture.json").write_bytes(b'{"id": "c-2026')
    (store.folder / SECOND / "capture.json").write_bytes(b'{"id": "%s"}' % THIRD.encode())
    assert [capture.id for capture in store.load()] == [THIRD]


def test_the_folder_is_private_and_locked_by_one_daemon(tmp_path: Path) -> None:
    (tmp_path / "captures").mkdir(mode=0o777)
    store = _store(tmp_path)
    assert store.folder.stat().st_mode & 0o777 == 0o700
    with pytest.raises(CaptureError, match="in use by another process"):
        _store(tmp_path)
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "captures").symlink_to(tmp_path)
    with pytest.raises(CaptureError, match="cannot be used"):
        _store(tmp_path / "link")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to somebody else")
def test_a_folder_that_somebody_else_made_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "captures").mkdir()
    os.chown(tmp_path / "captures", 12345, 12345)
    with pytest.raises(CaptureError, match="belongs to another user"):
        _store(tmp_path)


def test_an_artifact_that_is_gone_is_told_as_such(tmp_path: Path) -> None:
    store = _store(tmp_path)
    _finish(store, FIRST, rank=3)
    artifact, size = store.open(FIRST, 3)
    with artifact:
        assert len(artifact.read()) == size == 1 << 20
    with pytest.raises(CaptureError, match="no artifact of rank 4: the rank delivered none, or it made room"):
        store.open(FIRST, 4)


def test_a_tenant_with_many_captures_evicts_only_its_own(tmp_path: Path) -> None:
    store = _store(tmp_path, total_bytes=5_000_000)
    store.assign(FIRST, "pod few")
    _finish(store, FIRST)
    many = [f"c-20261115-1200{second}-abcdef" for second in range(10, 20)]
    for capture_id in many:
        store.assign(capture_id, "pod many")
        _finish(store, capture_id)
    assert _has(store, FIRST) and [_has(store, one) for one in many] == [False] * 7 + [True] * 3
    store.close()
    # Who is who survives a restart.
    again = _store(tmp_path, total_bytes=3_000_000)
    again.load()
    assert _has(again, FIRST) and [_has(again, one) for one in many] == [False] * 9 + [True]


def test_a_new_tenant_gets_room_from_the_largest_one(tmp_path: Path) -> None:
    store = _store(tmp_path, total_bytes=3_500_000)
    for capture_id, tenant in ((FIRST, "uid 1"), (SECOND, "uid 1"), (THIRD, "uid 2")):
        store.assign(capture_id, tenant)
        _finish(store, capture_id)
    assert _has(store, FIRST)
    new = "c-20261115-120100-abcdef"
    store.assign(new, "uid 3")
    _finish(store, new)
    assert [_has(store, one) for one in (FIRST, SECOND, THIRD, new)] == [False, True, True, True]


def test_room_is_reserved_over_all_captures_before_anything_is_written(tmp_path: Path) -> None:
    store = _store(tmp_path, total_bytes=10_000_000)
    store.assign(FIRST, "uid 1")
    store.assign(SECOND, "uid 2")
    first, second = store.workspace(FIRST), store.workspace(SECOND)
    first.reserve(first.folder / "rank0.json", 6_000_000)
    first.reserve(first.folder / "rank0.json", 7_000_000)  # asked again: instead, not as well
    with pytest.raises(
        CaptureError, match=r"bytes of captures do not fit into the quota of 10000000 bytes, .* of uid 2"
    ):
        second.reserve(second.folder / "rank0.json", 4_000_000)
    second.reserve(second.folder / "rank0.json", 2_500_000)
    store.clean(FIRST)
    second.reserve(second.folder / "rank1.json", 4_000_000)


def test_one_tenants_running_captures_leave_quota_to_others(tmp_path: Path) -> None:
    store = _store(tmp_path, total_bytes=10_000_000)
    store.assign(FIRST, "uid 1")
    place = store.workspace(FIRST)
    place.reserve(place.folder / "rank0.json", 7_000_000)
    with pytest.raises(CaptureError, match=r"of recordings of uid 1 at once .* \(75% of 10000000 bytes\)"):
        place.reserve(place.folder / "rank1.json", 1_000_000)


def test_reserved_room_counts_as_used_disk_space(tmp_path: Path) -> None:
    store = _store(tmp_path, Disk(100 * GIGABYTE, 92 * GIGABYTE, 8 * GIGABYTE))
    first, second = store.workspace(FIRST), store.workspace(SECOND)
    first.reserve(first.folder / "rank0.json", 2 * GIGABYTE)
    with pytest.raises(CaptureError, match="the disk is almost full"):
        second.reserve(second.folder / "rank0.json", 2 * GIGABYTE)


def test_a_capture_under_way_is_not_too_old_either() -> None:
    kept = [Kept("a", 0.0, GIGABYTE, True), Kept("b", 1.0, GIGABYTE, False)]
    usage = Usage(100 * GIGABYTE, GIGABYTE, 1e9)
    assert [one.name for one in captures_to_evict(kept, usage, 0, Quota(age_seconds=1.0))[0]] == ["b"]
