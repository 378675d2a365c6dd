"""Tenants that take more captures, disk, sockets or records than others: the others keep theirs."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import grpc
import pytest

from rankscope.daemon.captures.kineto import sockets
from rankscope.daemon.captures.service import NodeCaptures
from rankscope.daemon.config import Config
from rankscope.daemon.samples import RankProcess
from rankscope.v1 import capture_service_pb2 as pb
from rankscope.v1.capture_service_pb2_grpc import CaptureServiceStub
from tests.integration.daemon_process import Serving, serving
from tests.integration.kineto_peers import Peer, peer
from tests.security.bystander import Bystander
from tests.security.forged_ranks import EMPTY, NEVER, NOBODY, captured, forged_rank, job_of
from tests.security.tenants import tenant
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="to see other users' jobs needs root")

QUOTA_BYTES = 20_000_000
HOLE_BYTES = 256 << 20
# Fits into the quota by default.
MANY_HOLES_BYTES = 3 << 30
MAX_ACTIVE, ACTIVE_SPARE = 8, 4
# Whatever else runs on this machine.
RUN = f"forged-{os.getpid()}"


class Usage:
    """The most that a directory has held."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._done = threading.Event()
        self.most_bytes = 0

    def __enter__(self) -> Usage:
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        is_done = False
        while not is_done:  # once more at the end
            is_done = self._done.wait(0.005)
            used = 0
            with suppress(OSError):  # removed in between
                for path in self._folder.rglob("*"):
                    used += path.lstat().st_blocks * 512
            self.most_bytes = max(used, self.most_bytes)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Serving]:
    flags = ("--capture-quota-bytes", str(QUOTA_BYTES), "--stack-rate-hertz", "0", "--gpu", "false")
    with serving(tmp_path, "daemon", *flags) as started:
        yield started


def test_a_forged_trace_stays_within_the_quota_with_a_reason(daemon: Serving, tmp_path: Path) -> None:
    with forged_rank(RUN, HOLE_BYTES, uid=NOBODY):
        job = job_of(daemon, RUN)
        with Usage(tmp_path / "captures") as usage:
            capture = captured(daemon, job)
    assert 0 < usage.most_bytes < QUOTA_BYTES
    (rank,) = capture.ranks
    assert rank.backend == "probe" and rank.state == pb.CAPTURE_STATE_FAILED, capture
    assert "bytes of recordings of uid 65534 at once do not fit into" in rank.error, rank.error
    assert "raise --capture-quota-bytes" in rank.error
    assert [path.name for path in (tmp_path / "captures" / capture.id).rglob("rank*")] == []


def test_a_trace_within_the_quota_is_fetched(daemon: Serving) -> None:
    with forged_rank(RUN, len(EMPTY), EMPTY, uid=NOBODY):
        (rank,) = captured(daemon, job_of(daemon, RUN)).ranks
    assert any("the trace is empty" in note for note in rank.notes), rank


def test_one_users_endless_captures_leave_places_for_others(daemon: Serving) -> None:
    with ExitStack() as stack, grpc.insecure_channel(daemon.grpc_target) as channel:
        for number in range(MAX_ACTIVE):
            stack.enter_context(forged_rank(f"{RUN}-greedy{number}-", NEVER, uid=NOBODY))
        stack.enter_context(forged_rank(f"{RUN}-other-", len(EMPTY), EMPTY, uid=NOBODY - 1))
        refusals = []
        for number in range(MAX_ACTIVE):
            job = job_of(daemon, f"{RUN}-greedy{number}-")
            request = pb.StartCaptureRequest(job=job, steps=2, patience_seconds=300)
            running = CaptureServiceStub(channel).StartCapture(request)
            try:
                next(running)
            except grpc.RpcError as error:
                refusals.append(str(error.details()))
        (rank,) = captured(daemon, job_of(daemon, f"{RUN}-other-")).ranks
    assert any("the trace is empty" in note for note in rank.notes), rank
    assert len(refusals) == ACTIVE_SPARE
    assert all("of uid 65534: c-" in text and "are for others; wait for one or cancel it" in text for text in refusals)


@pytest.fixture
def captures(tmp_path: Path) -> Iterator[NodeCaptures]:
    made = NodeCaptures(Config(capture_dir=str(tmp_path / "captures"), node="n"))
    made.start()
    yield made
    made.stop()


def test_namespaces_of_one_user_leave_sockets_for_others(
    captures: NodeCaptures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "MAX_NAMESPACES", 4)
    endpoint = captures._endpoint

    def rank(of: Peer, number: int) -> RankProcess:
        environment = {"KINETO_USE_DAEMON": "1"}
        return RankProcess("a-greedy-job", number, 0, 9, of.pid, of.start_ticks, (of.pid,), environment)

    with ExitStack() as stack:
        greedy = [stack.enter_context(tenant()) for _ in range(6)]
        ranks = [rank(each, number) for number, each in enumerate(greedy)]
        captures.observe(ranks, {})
        wait_until(lambda: sum(endpoint.served_seconds(each.namespace) is not None for each in greedy) == 4)
        served = {each.namespace for each in greedy if endpoint.served_seconds(each.namespace) is not None}
        other = stack.enter_context(peer())
        captures.observe([*ranks, rank(other, 7)], {})
        wait_until(lambda: endpoint.served_seconds(other.namespace) is not None)
        wait_until(lambda: sum(endpoint.served_seconds(one) is not None for one in served) == 3)

        def failures() -> list[str]:
            return [failure for each in greedy if (failure := endpoint.failure(each.namespace))]

        wait_until(lambda: len(failures()) == 3)
        assert "uid 65534 has ranks in 6 network namespaces; 4 are served on a node" in str(failures())


def test_forged_traces_and_namespaces_cost_another_job_no_windows(bystander: Bystander) -> None:
    daemon = bystander.serving
    done, failed = threading.Event(), list[str]()

    def attack(job: str) -> None:
        while not done.wait(0.2):
            failed.extend(rank.error for rank in captured(daemon, job).ranks)

    with bystander.under_attack() as watch, ExitStack() as stack:
        with bystander.node():
            stack.enter_context(forged_rank(RUN, MANY_HOLES_BYTES, uid=NOBODY))
            for number in range(6):
                apart = forged_rank(
                    f"netns-{number}", NEVER, uid=NOBODY, enter=("unshare", "--net"), KINETO_USE_DAEMON="1"
                )
                stack.enter_context(apart)
        attacker = threading.Thread(target=attack, args=(job_of(daemon, RUN),))
        attacker.start()
        try:
            watch.observe()
        finally:
            done.set()
            attacker.join()
    assert failed and all("is no text; no profiler wrote it" in error for error in failed), failed
