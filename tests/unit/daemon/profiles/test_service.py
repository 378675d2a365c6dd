from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from rankscope.analysis.profiles.pprof import read_pprof
from rankscope.daemon.loop import Daemon
from rankscope.daemon.profiles import service
from rankscope.daemon.samples import RankProcess, StallDump
from rankscope.daemon.server import rank_requests
from rankscope.v1 import profile_service_pb2 as pb
from rankscope.v1.profile_service_pb2_grpc import ProfileServiceStub
from tests.unit.daemon import window_makers as make
from tests.unit.daemon.profiles.served_profiles import LOAD, RUN, SECOND, STEP, dump, record, served_profiles


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Daemon]:
    with served_profiles(tmp_path) as daemon:
        yield daemon


@pytest.fixture
def stub(served: Daemon) -> Iterator[ProfileServiceStub]:
    with grpc.insecure_channel(served.addresses.grpc_targets[0]) as channel:
        yield ProfileServiceStub(channel)


def selection(minutes: float = 10.0, **more: object) -> pb.ProfileSelection:
    start = time.time_ns() - round(minutes * 60 * SECOND)
    return pb.ProfileSelection(**{"job": RUN, "start_unix_nanos": start, **more})  # type: ignore[arg-type]


def query(stub: ProfileServiceStub, **more: object) -> Counter[int]:
    """Samples by rank."""
    parts = list(stub.QueryProfile(pb.QueryProfileRequest(selection=selection(**more))))  # type: ignore[arg-type]
    assert all(0 < len(part.pprof) <= service.CHUNK_BYTES for part in parts)
    counts: Counter[int] = Counter()
    for row in read_pprof(b"".join(part.pprof for part in parts)):
        counts[row.rank] += row.samples
    return counts


def refused(call: object, *arguments: object) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as refusal:
        answer = call(*arguments)  # type: ignore[operator]
        list(answer) if not hasattr(answer, "DESCRIPTOR") else None
    return refusal.value.code().name, refusal.value.details() or ""


def test_profiles_are_filtered_by_rank_phase_thread_and_time(served: Daemon, stub: ProfileServiceStub) -> None:
    record(served, 0, {LOAD: 3, STEP: 5})
    record(served, 1, {LOAD: 7})
    record(served, 1, {LOAD: 11}, seconds_ago=3600)
    record(served, 0, {LOAD: 13}, run="another")
    assert query(stub) == {0: 8, 1: 7}
    assert query(stub, ranks=[1]) == {1: 7}
    assert query(stub, phases=["optimizer"]) == {0: 5}
    assert query(stub, threads=["pin"]) == {}
    assert query(stub, minutes=90) == {0: 8, 1: 18}
    assert query(stub, job="another") == {0: 13}
    assert query(stub, job="unknown") == {}


def test_pods_restrict_dumps_to_ranks_that_run_in_them(stub: ProfileServiceStub) -> None:
    answer = stub.DumpStacks(pb.DumpStacksRequest(job=RUN, pods=["pod-0", "pod-9"]))
    assert [one.rank for one in answer.ranks] == [0]


def test_a_rank_without_a_reference_is_compared_with_others(served: Daemon, stub: ProfileServiceStub) -> None:
    for rank in range(3):
        record(served, rank, {LOAD: 600 if rank == 1 else 20, STEP: 600})
    record(served, 1, {LOAD: 600, STEP: 600}, seconds_ago=7200)
    found = stub.CompareProfiles(pb.CompareProfilesRequest(selection=selection(ranks=[1])))
    assert (found.excesses[0].function, found.excesses[0].line, found.excesses[0].file) == (
        "load_image",
        88,
        "/app/dataset.py",
    )
    assert found.excesses[0].share_ratio == pytest.approx(0.5)
    assert (found.samples, found.reference_samples, found.reason) == (1200, 1240, "")
    earlier = selection(ranks=[1], start_unix_nanos=time.time_ns() - 8000 * SECOND)
    earlier.end_unix_nanos = time.time_ns() - 7000 * SECOND
    same = stub.CompareProfiles(pb.CompareProfilesRequest(selection=selection(ranks=[1]), reference=earlier))
    assert not same.excesses and same.reference_samples == 1200
    few = stub.CompareProfiles(pb.CompareProfilesRequest(selection=selection(ranks=[7])))
    assert "too few" in few.reason


def test_stacks_of_all_ranks_are_dumped_or_a_reason_given(served: Daemon, stub: ProfileServiceStub) -> None:
    answer = stub.DumpStacks(pb.DumpStacksRequest(job=RUN))
    first, deep, denied = answer.ranks
    assert (first.rank, first.node, first.phase) == (0, "node-a", "input")
    assert list(first.frames) == ["load_image (/app/dataset.py:88)", "main (/app/train.py:10)"]
    assert len(deep.frames) == service.MAX_FRAMES
    assert not denied.frames and denied.problem.startswith("rank 2: not") and denied.problem.isprintable()
    assert [one.rank for one in stub.DumpStacks(pb.DumpStacksRequest(job=RUN, ranks=[1, 9])).ranks] == [1]
    assert not stub.DumpStacks(pb.DumpStacksRequest(job="unknown")).ranks


@pytest.fixture
def frugal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that allows no further dump while a test runs, however long that takes."""
    monkeypatch.setattr(service, "DUMPS_PER_SECOND", 1e-6)


def test_dumps_are_limited_in_number_and_one_at_a_time(
    frugal: None, served: Daemon, stub: ProfileServiceStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_requests, "QUEUE_SECONDS", 0.05)
    begun, go_on = threading.Event(), threading.Event()

    def slow(rank: RankProcess) -> StallDump:
        begun.set()
        go_on.wait(180.0)
        return StallDump("input", LOAD)

    source = served._collectors.stacks
    source.dump = slow  # type: ignore[attr-defined]
    request = pb.DumpStacksRequest(job=RUN)
    first = stub.DumpStacks.future(request)
    assert begun.wait(180.0)
    code, text = refused(stub.DumpStacks, request)
    assert code == "RESOURCE_EXHAUSTED" and "try again" in text
    go_on.set()
    assert len(first.result().ranks) == 3
    outcomes = [refused(stub.DumpStacks, request) for _ in range(10) if not _is_answered(stub, request)]
    assert outcomes and all(code == "RESOURCE_EXHAUSTED" and " s" in text for code, text in outcomes)
    assert len(source.dumped) <= service.DUMPS_BURST + 1  # type: ignore[attr-defined]


def _is_answered(stub: ProfileServiceStub, request: pb.DumpStacksRequest) -> bool:
    try:
        stub.DumpStacks(request)
    except grpc.RpcError:
        return False
    return True


def test_flight_recorders_are_read_only_if_they_are_asked_for(stub: ProfileServiceStub) -> None:
    assert not any(one.HasField("flight_recorder") for one in stub.DumpStacks(pb.DumpStacksRequest(job=RUN)).ranks)
    answer = stub.DumpStacks(pb.DumpStacksRequest(job=RUN, with_flight_recorder=True))
    assert answer.ranks[0].frames
    assert all("runs without the probe" in one.flight_recorder.problem for one in answer.ranks)


def test_many_ranks_are_dumped_in_turns_and_not_without_end(tmp_path: Path) -> None:
    now, asked = [0.0], []

    def dump_some(ranks: Sequence[RankProcess]) -> dict[object, object]:
        asked.append(len(ranks))
        now[0] += 2.0
        return {rank.key: StallDump("input", LOAD) for rank in ranks}

    ranks = [make.rank(number) for number in range(100)]
    dump: Any = dump_some
    servicer = service.ProfileServicer("n", None, lambda: ranks, dump, lambda _: {}, monotonic_seconds=lambda: now[0])
    answer = servicer.DumpStacks(pb.DumpStacksRequest(job=RUN), None)  # type: ignore[arg-type]
    assert max(asked) == service.DUMPED_AT_ONCE
    assert sum(bool(one.frames) for one in answer.ranks) == sum(asked) < 100
    assert all(one.frames or "fewer ranks" in one.problem for one in answer.ranks)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"job": ""}, "name the run"),
        ({"job": "x" * 600}, "more than 512 characters"),
        ({"ranks": range(20000)}, "ranks"),
        ({"ranks": [1 << 31]}, "ranks"),
        ({"threads": ["p"] * 2000}, "names"),
        ({"threads": ["x" * 600]}, "more than 512 characters"),
        ({"phases": ["lunch\x1b"]}, "there are input"),
        ({"start_unix_nanos": 0}, "up to 24 h"),
        ({"start_unix_nanos": 5, "end_unix_nanos": 4}, "up to 24 h"),
        ({"start_unix_nanos": -(1 << 63), "end_unix_nanos": (1 << 63) - 1}, "up to 24 h"),
    ],
)
def test_requests_that_make_no_sense_are_refused_with_what_would(
    stub: ProfileServiceStub, change: dict[str, object], text: str
) -> None:
    chosen = selection(**change)  # type: ignore[arg-type]
    for call, request in (
        (stub.QueryProfile, pb.QueryProfileRequest(selection=chosen)),
        (stub.CompareProfiles, pb.CompareProfilesRequest(selection=selection(ranks=[1]), reference=chosen)),
    ):
        if call is stub.CompareProfiles and change in ({"job": ""}, {"start_unix_nanos": 0}):
            continue  # taken from the selection
        code, reason = refused(call, request)
        assert code == "INVALID_ARGUMENT" and text in reason and reason.isprintable()
    code, reason = refused(stub.CompareProfiles, pb.CompareProfilesRequest(selection=selection()))
    assert code == "INVALID_ARGUMENT" and "name the ranks" in reason


def test_a_too_large_answer_is_refused_with_a_next_step(
    served: Daemon, stub: ProfileServiceStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(served, 0, {LOAD: 3, STEP: 5})
    monkeypatch.setattr(service, "MAX_ROWS", 1)
    code, reason = refused(stub.QueryProfile, pb.QueryProfileRequest(selection=selection()))
    assert code == "RESOURCE_EXHAUSTED" and "shorter time" in reason


def test_a_caller_that_does_not_read_is_hung_up_on(
    served: Daemon, stub: ProfileServiceStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(served, 0, {LOAD: 3})
    hung_up = threading.Event()

    class Timer(threading.Timer):
        def __init__(self, seconds: float, call: Callable[[], object]) -> None:
            super().__init__(seconds, lambda: (call(), hung_up.set()))

    monkeypatch.setattr(service, "SEND_SECONDS", 0.5)
    monkeypatch.setattr(service, "threading", SimpleNamespace(Timer=Timer))
    monkeypatch.setattr(service, "pprof", lambda *_: bytes(16 << 20))  # more than gRPC sends ahead
    answer = stub.QueryProfile(pb.QueryProfileRequest(selection=selection()))
    with pytest.raises(grpc.RpcError):
        next(answer)
        assert hung_up.wait(180.0)
        list(answer)


def test_without_a_store_profiles_are_refused_but_stacks_dumped(tmp_path: Path) -> None:
    config = make.config(socket=str(tmp_path / "d.sock"))
    daemon = Daemon(config, collectors=make.collectors(make.rank(0)), clock=make.FakeClock(seconds=-1.0))
    daemon._collectors.stacks.dump = dump  # type: ignore[attr-defined]
    daemon.start()
    try:
        daemon.tick(make.span(0))
        with grpc.insecure_channel(daemon.addresses.grpc_targets[0]) as channel:
            stub = ProfileServiceStub(channel)
            code, reason = refused(stub.QueryProfile, pb.QueryProfileRequest(selection=selection()))
            assert code == "FAILED_PRECONDITION" and "--profile-dir" in reason
            assert len(stub.DumpStacks(pb.DumpStacksRequest(job=RUN)).ranks) == 1
    finally:
        daemon.stop()


def test_store_counts_are_in_metrics_and_problems_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "taken").write_text("a file where the folder should be")
    config = make.config(socket=str(tmp_path / "d.sock"), profile_dir=str(tmp_path / "taken"))
    daemon = Daemon(config, collectors=make.collectors(make.rank(0)), clock=make.FakeClock(seconds=-1.0))
    daemon.start()
    try:
        record(daemon, 0, {LOAD: 3})
        daemon.tick(make.span(0))
        status = daemon.snapshot().daemon.profiles
        assert status is not None and (status.samples_stored, status.samples_lost) == (0, 3)
        assert "profiles cannot be stored" in caplog.text
        with grpc.insecure_channel(daemon.addresses.grpc_targets[0]) as channel:
            *_, last = ProfileServiceStub(channel).QueryProfile(pb.QueryProfileRequest(selection=selection()))
        assert "profiles cannot be stored" in last.problems[0]
    finally:
        daemon.stop()
