from __future__ import annotations

import random
import shutil
import sqlite3
import threading
from collections import Counter, namedtuple
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankscope.analysis.profiles.frames import Frame, Stack
from rankscope.daemon.profiles import database, segment, store
from rankscope.daemon.profiles.database import SET_ASIDE, Limits
from rankscope.daemon.profiles.segment import (
    MAX_FRAMES_PER_STACK,
    MAX_NEW_FRAMES,
    MAX_STACKS_PER_INTERVAL,
    NAME_CHARACTERS,
)
from rankscope.daemon.profiles.store import ProfileStore, Query
from rankscope.daemon.samples import Recording, Span

SECOND = 10**9
MINUTE = 60 * SECOND
FIRST_FILE = "profiles-000001.sqlite"
EVER = Span(0, 1 << 60)
LIMITS = Limits(total_bytes=1 << 30, age_seconds=7 * 86400.0)
MAIN = Frame("main", "train.py", 10)
LOAD: Stack = (Frame("__getitem__", "/app/dataset.py", 88), Frame("f", "/x/torch/utils/data/dataloader.py", 1), MAIN)
STEP: Stack = (Frame("step", "/x/torch/optim/adam.py", 3), MAIN)


def new_store(folder: Path, limits: Limits = LIMITS, interval_seconds: float = 60.0) -> ProfileStore:
    return ProfileStore(folder, limits, interval_seconds, unix_nanos=lambda: 100 * MINUTE)


def recording(
    stacks: dict[Stack, int], *, minute: int = 1, rank: int = 0, run: str = "run", thread: str = "MainThread"
) -> Recording:
    span = Span(minute * MINUTE, minute * MINUTE + 2 * SECOND)
    return Recording(run, rank, span, SECOND // 10, Counter(stacks), thread)


def distinct(seed: int, count: int, depth: int = 40) -> dict[Stack, int]:
    """Stacks that compress badly."""
    chosen = random.Random(seed)
    return {
        tuple(Frame(f"f{chosen.getrandbits(64):x}", f"{chosen.getrandbits(64):x}.py", 1) for _ in range(depth)): 1
        for _ in range(count)
    }


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[ProfileStore]:
    made = new_store(tmp_path / "profiles")
    yield made
    made.close()


def test_records_are_found_by_run_rank_time_thread_and_phase(opened: ProfileStore) -> None:
    opened.record(recording({LOAD: 3, STEP: 5}))
    opened.record(recording({LOAD: 4}, minute=2, rank=1, thread="pin"))
    opened.record(recording({STEP: 7}, run="other"))
    assert opened.flush()
    everything = opened.query(Query("run", EVER))
    assert everything.samples_total == 12 and everything.nanos_total == 12 * SECOND // 10
    assert Counter({(one.stack, one.rank, one.thread, one.phase): one.samples for one in everything}) == {
        (LOAD, 0, "MainThread", "input"): 3,
        (STEP, 0, "MainThread", "optimizer"): 5,
        (LOAD, 1, "pin", "input"): 4,
    }
    assert opened.query(Query("run", EVER, ranks={0})).samples_total == 8
    assert opened.query(Query("run", EVER, threads={"pin"})).samples_total == 4
    assert opened.query(Query("run", EVER, phases={"optimizer"})).samples_total == 5
    assert opened.query(Query("run", Span(2 * MINUTE, 3 * MINUTE))).samples_total == 4
    assert opened.query(Query("run", Span(3 * MINUTE, 4 * MINUTE))).samples_total == 0
    assert opened.status().samples_stored == 19 and opened.status().problem is None


def test_an_open_interval_is_found_once_before_and_after_writing(opened: ProfileStore) -> None:
    opened.record(recording({LOAD: 3}))
    while opened.query(Query("run", EVER)).samples_total == 0:
        pass
    assert opened.query(Query("run", EVER)).samples_total == 3
    assert opened.status().samples_stored == 0
    opened.flush()
    assert opened.query(Query("run", EVER)).samples_total == 3


def test_an_interval_is_written_when_it_is_over(tmp_path: Path) -> None:
    made = new_store(tmp_path, interval_seconds=0.01)
    made.record(recording({LOAD: 3}))
    while made.status().samples_stored == 0:
        assert made.status().problem is None
    made.close()


def test_profiles_outlive_the_daemon_and_nobody_else_can_read_them(tmp_path: Path) -> None:
    folder = tmp_path / "profiles"
    for minute in (1, 2):
        made = new_store(folder)
        made.record(recording({LOAD: 3}, minute=minute))
        made.flush()
        assert {oct(path.stat().st_mode & 0o777) for path in folder.iterdir()} == {"0o600"}
        assert made.query(Query("run", EVER)).samples_total == 3 * minute
        made.close()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_store_that_another_daemon_uses_is_left_to_it(tmp_path: Path, opened: ProfileStore) -> None:
    assert opened.flush()
    second = new_store(tmp_path / "profiles")
    second.record(recording({LOAD: 3}))
    second.flush()
    status = second.status()
    assert status.problem is not None and status.problem.kind == "folder" and status.samples_lost == 3
    assert second.query(Query("run", EVER)).samples_total == 0
    second.close()


def test_recording_never_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_writing, unblocked = threading.Event(), threading.Event()

    def write(*_: object) -> None:
        is_writing.set()
        unblocked.wait(180)

    monkeypatch.setattr(database.Database, "write", write)
    made = new_store(tmp_path, interval_seconds=0.001)
    made.record(recording({LOAD: 1}))
    assert is_writing.wait(180)
    for _ in range(3 * store.MAX_QUEUE):
        made.record(recording({LOAD: 1}))
    status = made.status()
    assert status.problem is not None and status.problem.kind == "slow"
    assert status.samples_lost == 2 * store.MAX_QUEUE
    unblocked.set()
    made.close()


def test_names_are_bounded_and_printable(opened: ProfileStore) -> None:
    hostile = Frame("f\x1b[2J\n\ud800" + "f" * 10_000, "/a" * 10_000 + "/end.py", 1 << 70)
    run = "r\x00" * 10_000
    opened.record(recording({(hostile,) * 10_000: 1}, run=run, thread="t\x07" * 1000))
    opened.flush()
    (found,) = opened.query(Query(run, EVER))
    assert len(found.stack) == MAX_FRAMES_PER_STACK
    for name in (found.stack[0].function, found.stack[0].file, found.thread):
        assert name.isprintable() and len(name) <= NAME_CHARACTERS
    assert found.stack[0].file.endswith("/end.py") and found.stack[0].line == 0


def test_a_rank_with_too_many_stacks_leaves_others_room(opened: ProfileStore) -> None:
    opened.record(recording(distinct(1, 100, depth=200)))
    opened.record(recording({LOAD: 3}, rank=1))
    many = dict.fromkeys(((Frame("f", "f", line),) for line in range(MAX_STACKS_PER_INTERVAL)), 1)
    opened.record(recording(many, rank=2))
    opened.record(recording({LOAD: 7}, rank=2))
    opened.flush()
    found = opened.query(Query("run", EVER))
    assert found.filter(ranks={0}).samples_total == 100
    assert found.filter(ranks={1}).samples_total == 3
    assert found.filter(ranks={2}).samples_total == MAX_STACKS_PER_INTERVAL
    assert opened.status().samples_lost == 7
    assert len(found.frames) <= 2 * MAX_NEW_FRAMES + 10


def test_stacks_too_many_for_one_segment_are_split(
    opened: ProfileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment, "MAX_STACKS", 30)
    for rank in range(5):
        opened.record(recording(distinct(rank, 20), rank=rank))
    opened.flush()
    found = opened.query(Query("run", EVER))
    assert sorted(found.rank.tolist()) == sorted(list(range(5)) * 20) and opened.status().samples_stored == 100
    assert len(list((tmp_path / "profiles").glob("*.sqlite"))) == 5


@pytest.mark.parametrize("change", [{"rank": -1}, {"rank": 1 << 63}, {"period_nanos": 1 << 63}, {"span": Span(-1, 1)}])
def test_numbers_that_no_recording_has_are_lost_and_damage_nothing(
    opened: ProfileStore, change: dict[str, object]
) -> None:
    one = recording({LOAD: 3})
    opened.record(Recording(**{**vars(one), **change}))  # type: ignore[arg-type]
    opened.record(one)
    opened.flush()
    assert opened.query(Query("run", EVER)).samples_total == 3
    assert opened.status().samples_lost == 3


def test_the_oldest_profiles_are_dropped_to_stay_within_size(tmp_path: Path) -> None:
    limits = replace(LIMITS, total_bytes=1 << 20, free_ratio=0.0)
    made = new_store(tmp_path, limits)
    for minute in range(1, 60):
        made.record(recording(distinct(minute, 20), minute=minute))
        made.flush()
        sizes = [path.stat().st_size for path in tmp_path.glob("*.sqlite")]
        assert sum(sizes) <= limits.total_bytes * 1.2 and made.status().size_bytes <= limits.total_bytes * 1.2
    found = made.query(Query("run", EVER)).samples_total
    newest = made.query(Query("run", Span(50 * MINUTE, 60 * MINUTE))).samples_total
    assert newest == 200 and 200 < found < 59 * 20
    made.close()


def test_repeated_restarts_keep_a_bounded_number_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "MAX_FILES", 3)
    for minute in range(1, 7):
        made = new_store(tmp_path)
        made.record(recording({LOAD: 1}, minute=minute))
        made.flush()
        assert made.query(Query("run", EVER)).samples_total == min(minute, 3)
        made.close()
    assert {path.name for path in tmp_path.iterdir()} == {f"profiles-00000{number}.sqlite" for number in (4, 5, 6)}


def test_profiles_older_than_the_age_limit_are_removed(tmp_path: Path) -> None:
    now = [10 * MINUTE, 0.0]
    made = ProfileStore(
        tmp_path,
        replace(LIMITS, age_seconds=3600.0),
        60.0,
        unix_nanos=lambda: int(now[0]),
        monotonic_seconds=lambda: now[1],
    )
    for minute in (10, 90, 180):
        now[0], now[1] = minute * MINUTE, minute * 60.0
        made.record(recording({LOAD: 1}, minute=minute))
        made.flush()
    assert made.query(Query("run", EVER)).samples_total == 1
    made.close()


def test_foreign_files_are_set_aside_and_one_is_kept(tmp_path: Path) -> None:
    for number, content in enumerate((b"not a database" * 1000, b"another one" * 1000), 1):
        (tmp_path / FIRST_FILE).write_bytes(content)
        made = new_store(tmp_path)
        while made.status().problem is None:
            pass
        assert made.status().problem.kind == "corrupt" and FIRST_FILE in made.status().problem.text
        made.record(recording({LOAD: 3}))
        made.flush()
        assert made.query(Query("run", EVER)).samples_total == 3 * number
        assert made.status() == replace(made.status(), samples_stored=3, samples_lost=0, problem=None)
        made.close()
        assert (tmp_path / SET_ASIDE).read_bytes() == content
    assert {path.name for path in tmp_path.glob("*.damaged")} == {SET_ASIDE}


@pytest.mark.parametrize("kind", ["link", "folder", "empty", "version"])
def test_profiles_are_stored_whatever_occupies_a_files_place(tmp_path: Path, kind: str) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "profiles"
    victim.write_text("precious")
    new_store(folder).close()
    place = folder / FIRST_FILE
    if kind == "link":
        place.symlink_to(victim)
    elif kind == "folder":
        place.mkdir()
    elif kind == "empty":
        place.touch()
    else:
        with sqlite3.connect(place) as connection:
            connection.executescript("CREATE TABLE intervals (x); PRAGMA user_version = 99")
        connection.close()
    made = new_store(folder)
    made.record(recording({LOAD: 3}))
    made.flush()
    assert made.query(Query("run", EVER)).samples_total == made.status().samples_stored == 3
    made.close()
    assert victim.read_text() == "precious"
    assert (folder / SET_ASIDE).exists() == (kind == "version")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("sound")
    made = new_store(folder)
    for minute in range(1, 30):
        made.record(recording(distinct(minute % 3, 10) | {LOAD: 3}, minute=minute))
        made.flush()
    made.close()
    return (folder / FIRST_FILE).read_bytes()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=30),
    st.floats(0.1, 1.0),
    st.booleans(),
    st.booleans(),
)
def test_damage_is_never_raised_and_costs_no_new_profile(
    tmp_path: Path, sound: bytes, flips: list[tuple[float, int]], kept_ratio: float, in_header: bool, has_room: bool
) -> None:
    content = bytearray(sound)
    for place, bits in flips:
        content[int(place * (512 if in_header else len(content)))] ^= bits
    for path in tmp_path.iterdir():
        path.unlink()
    (tmp_path / FIRST_FILE).write_bytes(content[: int(kept_ratio * len(content))] if kept_ratio < 0.9 else content)
    made = new_store(tmp_path, replace(LIMITS, total_bytes=LIMITS.total_bytes if has_room else 40_000, free_ratio=0.0))
    for minute in range(40, 43):
        old = made.query(Query("run", Span(0, 31 * MINUTE))).samples_total
        assert 0 <= old <= 29 * 13
        made.record(recording({STEP: 1}, minute=minute))
        assert made.flush(180)
    found = made.query(Query("run", Span(40 * MINUTE, 44 * MINUTE))).samples_total
    status = made.status()
    made.close()
    assert found == status.samples_stored == 3 and status.samples_lost == 0


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE intervals SET rank = -1",
        "UPDATE intervals SET rank = 'x'",
        "UPDATE intervals SET period_nanos = 1 << 62",
        "UPDATE intervals SET period_nanos = NULL",
        "UPDATE intervals SET columns = 'text'",
        "UPDATE intervals SET columns = substr(columns, 1, length(columns) - 1)",
        "DELETE FROM dictionary",
        "UPDATE dictionary SET content = NULL",
        "UPDATE dictionary SET content = zeroblob(100)",
        "DROP TABLE dictionary",
    ],
)
def test_damaged_content_is_reported_and_set_aside(tmp_path: Path, change: str) -> None:
    made = new_store(tmp_path)
    made.record(recording({LOAD: 3}))
    made.close()
    with sqlite3.connect(tmp_path / FIRST_FILE) as connection:
        connection.execute(change)
    connection.close()
    made = new_store(tmp_path)
    made.flush()
    assert made.query(Query("run", EVER)).samples_total == 0
    problem = made.status().problem
    assert problem is not None and problem.kind == "corrupt" and FIRST_FILE in problem.text
    made.record(recording({LOAD: 5}))
    made.flush()
    assert made.query(Query("run", EVER)).samples_total == 5 and made.status().problem is None
    made.close()
    assert (tmp_path / SET_ASIDE).exists() and not (tmp_path / FIRST_FILE).exists()


def test_a_disk_that_is_almost_full_is_left_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = [50]
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100 << 20, 0, free[0] << 20))
    made = new_store(tmp_path)
    made.record(recording({LOAD: 3}))
    assert made.flush() and made.status().samples_stored == 3
    free[0] = 4
    made.record(recording({LOAD: 5}, minute=2))
    made.flush()
    status = made.status()
    assert status.problem is not None and status.problem.kind == "disk" and "make room" in status.problem.text
    assert status.samples_lost == 5 and made.query(Query("run", EVER)).samples_total == 0
    made.close()
