"""Attacks on others, on the daemon or on its clock, beside a job that must not notice. Other tests show that they fail;
these show that the defence costs the job nothing."""

from __future__ import annotations

import itertools
import json
import random
import re
import select
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest

from rankscope.daemon.captures.kineto.config import written_file
from rankscope.daemon.captures.records import FINAL
from rankscope.daemon.config import Config
from rankscope.daemon.server.grpc_server import MAX_DOWNLOADS
from rankscope.v1 import capture_service_pb2 as pb
from rankscope.v1.capture_service_pb2_grpc import CaptureServiceStub
from rankscope.v1.rank_service_pb2 import ListRanksRequest, WatchRanksRequest
from rankscope.v1.rank_service_pb2_grpc import RankServiceStub
from tests.integration.kineto_peers import Peer, peer
from tests.security.bystander import PATIENCE_SECONDS, RUN_ID, Bystander
from tests.security.forged_ranks import EMPTY, NEVER, NOBODY, forged_rank
from tests.security.metrics_reading import value
from tests.security.rank_processes import rank_processes, rank_variables
from tests.security.tenants import tenant, within
from tests.security.test_clock_jumps import HOUR, SET_CLOCK, set_clock
from tests.security.test_descriptors import DESCRIPTORS
from tests.security.test_slow_readers import UNREAD
from tests.support.waiting import wait_until

DECOYS = '{"a":[' + '{"traceEvents":0},' * 14_000 + '0],"traceEvents":[]}'
SECRET = '{"password": "of root"}'
SQUATTERS = 4
UNREAD_CALLS = 2 * (Config().watch_readers + MAX_DOWNLOADS)
CONNECTIONS_TIMED = 1024
LOG_FILE = re.compile(r"ACTIVITIES_LOG_FILE=(\S+)")


@contextmanager
def repeated(act: Callable[[], object], pause_seconds: float = 0.2) -> Iterator[None]:
    """Again and again, in a thread, until the end. An error there is an error here."""
    done = threading.Event()

    def run() -> None:
        while not done.wait(pause_seconds):
            act()

    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(run)
        try:
            yield
        finally:
            done.set()
        running.result()


def environment_of(pid: int, *prefixes: str) -> dict[str, str]:
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(variable.split("=", 1) for variable in variables if variable.startswith(prefixes))


def jobs_named(bystander: Bystander, run: str) -> set[str]:
    """Those with this in their name."""
    with grpc.insecure_channel(bystander.serving.grpc_target) as channel:
        answer = RankServiceStub(channel).ListRanks(ListRanksRequest(), timeout=PATIENCE_SECONDS)
    return {rank.identity.job for rank in answer.ranks if run in rank.identity.job}


def captures_of(bystander: Bystander, run: str) -> Callable[[], pb.Capture]:
    """Takes a capture, once there is a job of that name."""
    wait_until(lambda: jobs_named(bystander, run), lambda: bystander.log)
    (job,) = jobs_named(bystander, run)

    def capture() -> pb.Capture:
        request = pb.StartCaptureRequest(job=job, seconds=0.1, patience_seconds=PATIENCE_SECONDS / 2)
        with grpc.insecure_channel(bystander.serving.grpc_target) as channel:
            stream = CaptureServiceStub(channel).StartCapture(request, timeout=PATIENCE_SECONDS)
            return next(update.capture for update in stream if update.capture.ranks[0].state in FINAL)

    return capture


class Taken:
    """Captures that are taken under an attack. Each may cost what one of an honest rank costs with an empty trace."""

    def __init__(self, bystander: Bystander) -> None:
        with ExitStack() as stack:
            with bystander.node():
                stack.enter_context(forged_rank("honest", len(EMPTY), EMPTY, uid=NOBODY))
            honest = captures_of(bystander, "honest")
            began = time.time()
            self._cpu_seconds = min(bystander.cpu_seconds_of(honest) for _ in range(2))
            self._seconds = (time.time() - began) / 2
        self._times: list[list[float]] = []  # when each began, and ended
        self.captures: list[pb.Capture] = []

    def take(self, capture: Callable[[], pb.Capture]) -> None:
        self._times.append([time.time()])
        self.captures.append(capture())
        self._times[-1].append(time.time())

    def on_top(self, start: float, end: float) -> float:
        """One that is under way counts by its share of the time: what costs comes last."""
        whole = sum(len(times) == 2 and times[1] >= start for times in self._times)
        under_way = sum(min(1.0, (end - times[0]) / self._seconds) for times in self._times if len(times) == 1)
        return self._cpu_seconds * (whole + under_way)


# Ranks.


def test_another_users_claims_to_its_ranks_cost_a_job_nothing(bystander: Bystander) -> None:
    """Of older processes, which exec with the variables of the ranks, and of younger ones with rings."""
    names = ("RANK=", "LOCAL_RANK=", "MASTER_", "TORCHELASTIC_", "WORLD_SIZE=")
    claims = [environment_of(pid, *names) for pid in bystander.ranks]
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(dir=bystander.folder.parent))
        program = stack.enter_context(rank_processes(folder)).program
        watch = stack.enter_context(bystander.under_attack())
        with bystander.node():
            for claim in claims:
                stack.enter_context(forged_rank("", NEVER, uid=NOBODY, **claim))
        wait_until(lambda: len(jobs_named(bystander, RUN_ID)) == 2, lambda: bystander.log)
        for shell, claim in zip(bystander.older, claims, strict=True):
            words = " ".join(f"{name}='{text}'" for name, text in claim.items())
            assert shell.stdin is not None
            shell.stdin.write(f'exec env {words} "{program}" 600\n'.encode())
            shell.stdin.close()
            stack.callback(shell.kill)
        wait_until(lambda: value(bystander, "rankscope_daemon_rank_conflicts") == 2, lambda: bystander.log)
        watch.observe()


# Captures.


def test_a_trace_of_decoys_costs_a_job_beside_it_nothing(bystander: Bystander) -> None:
    taken = Taken(bystander)
    with bystander.under_attack() as watch, ExitStack() as stack:
        with bystander.node():
            stack.enter_context(forged_rank("decoys", len(DECOYS), DECOYS, uid=NOBODY))
        capture = captures_of(bystander, "decoys")
        with repeated(lambda: taken.take(capture), pause_seconds=5.0):
            watch.observe(on_top=taken.on_top)
    assert taken.captures
    assert all("the trace is empty" in str(one.ranks[0]) for one in taken.captures), taken.captures


def test_a_secret_mounted_over_a_trace_costs_other_jobs_nothing(bystander: Bystander) -> None:
    taken: list[pb.Capture] = []
    library = bystander.folder / "libtorch_cpu.so"
    library.write_bytes(b"torch")
    variables = rank_variables(0, 1, TORCHELASTIC_RUN_ID="thief", KINETO_USE_DAEMON="1")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder, bystander.under_attack() as watch, ExitStack() as stack:
        Path(folder).chmod(0o755)
        secret = Path(folder, "secret.json")
        secret.touch(mode=0o600)
        secret.write_text(SECRET)
        with bystander.node():
            thief = stack.enter_context(tenant(library, **variables))
        capture = captures_of(bystander, "thief")
        wait_until(lambda: "@dynolog@" in Path(f"/proc/{thief.pid}/net/unix").read_text(), lambda: bystander.log)
        stack.enter_context(repeated(lambda: mount_over_trace(thief, secret)))
        stack.enter_context(repeated(lambda: taken.append(capture())))
        watch.observe()
    assert taken and all("another file is mounted at" in one.ranks[0].error for one in taken), taken


def mount_over_trace(thief: Peer, secret: Path) -> None:
    """Polls as libkineto does."""
    for text in thief.polls():
        if found := LOG_FILE.search(text):
            path = written_file(found[1], thief.own_pid)
            within(thief, 'touch "$1" && mount --bind "$2" "$1"', path, secret)


def test_squatters_on_libkinetos_socket_cost_a_job_nothing(bystander: Bystander) -> None:
    taken = Taken(bystander)
    with bystander.under_attack() as watch, ExitStack() as stack:
        with bystander.node():
            squatters = [stack.enter_context(peer()) for _ in range(SQUATTERS)]
            for number, squatter in enumerate(squatters):
                assert squatter.do(do="squat") == "squatted"
                enter = ("nsenter", "--target", str(squatter.pid), "--net")
                rank = forged_rank(
                    f"squatted-{number}", len(EMPTY), EMPTY, uid=NOBODY, enter=enter, KINETO_USE_DAEMON="1"
                )
                stack.enter_context(rank)
        capture = captures_of(bystander, "squatted-0")
        found = [f"it belongs to pid {squatter.own_pid} (" for squatter in squatters]
        wait_until(lambda: all(words in bystander.log for words in found), lambda: bystander.log)
        with repeated(lambda: taken.take(capture), pause_seconds=5.0):
            watch.observe(on_top=taken.on_top)
    assert taken.captures and all(one.ranks[0].backend == "probe" for one in taken.captures), taken.captures
    assert all("belongs to pid" in str(one.ranks[0].notes) for one in taken.captures), taken.captures


# Callers.


def test_streams_and_downloads_that_nobody_reads_cost_a_job_nothing(bystander: Bystander) -> None:
    names = random.Random(1)
    event = {"ph": "X", "cat": "cpu_op", "pid": 1, "tid": 1, "dur": 1}
    events = [{**event, "ts": ts, "name": names.randbytes(40).hex()} for ts in range(20_000)]
    trace = json.dumps({"traceEvents": events})
    with ExitStack() as stack:
        with bystander.node():
            rank = stack.enter_context(ExitStack())
            alone = ("unshare", "--pid", "--fork", "--kill-child")  # it is pid 1, as in its trace
            rank.enter_context(forged_rank("downloaded", len(trace), trace, enter=alone))
        stored = captures_of(bystander, "downloaded")()
        rank.close()
        assert stored.ranks[0].state == pb.CAPTURE_STATE_ANALYSED, stored
        watch = stack.enter_context(bystander.under_attack())
        artifact = pb.DownloadArtifactRequest(id=stored.id)
        unread: list[grpc.Call] = []

        def open_unread() -> None:
            unread[:] = [call for call in unread if call.is_active()]
            while len(unread) < UNREAD_CALLS:
                channel = stack.enter_context(grpc.insecure_channel(bystander.serving.grpc_target, UNREAD))
                unread.append(RankServiceStub(channel).WatchRanks(WatchRanksRequest()))
                unread.append(CaptureServiceStub(channel).DownloadArtifact(artifact))

        open_unread()
        with repeated(open_unread, pause_seconds=3.0):
            watch.observe()
        with grpc.insecure_channel(bystander.serving.grpc_target) as channel:
            parts = CaptureServiceStub(channel).DownloadArtifact(artifact, timeout=PATIENCE_SECONDS)
            assert sum(len(part.chunk) for part in parts) == stored.ranks[0].bytes


# A daemon of their own: with few descriptors, and a clock that can be set.


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("clock") / "offset"
    set_clock(file, 0.0)
    return file


@pytest.fixture(scope="module")
def small(bystander: Bystander, clock: Path) -> Iterator[Bystander]:
    launcher = ("prlimit", f"--nofile={DESCRIPTORS}:{DESCRIPTORS}", sys.executable, "-c", SET_CLOCK, str(clock))
    with bystander.with_flags(launcher=launcher) as other:
        yield other


def test_silent_connections_cost_a_job_nothing(small: Bystander) -> None:
    """To accept one takes gRPC CPU time on top of the budget (docs/security.md). That it is silent costs nothing."""

    def connect_and_leave() -> None:
        for _ in range(CONNECTIONS_TIMED):
            with socket.create_connection(("127.0.0.1", small.grpc_port)) as connection:
                connection.recv(1)  # gRPC speaks first: it has been accepted

    accept_seconds = min(small.cpu_seconds_of(connect_and_leave) for _ in range(3)) / CONNECTIONS_TIMED
    ports = [int(small.metrics_url.split(":")[2].split("/")[0]), small.grpc_port]
    opened: dict[int, list[socket.socket]] = {port: [] for port in ports}
    accepted: list[float] = []  # when, by gRPC

    def renew() -> None:
        for port, connections in opened.items():
            for closed in select.select(connections, [], [], 0)[0]:
                connections.remove(closed)
                closed.close()
            while len(connections) < DESCRIPTORS:
                try:
                    connections.append(socket.create_connection(("127.0.0.1", port), timeout=1.0))
                except (TimeoutError, ConnectionError):
                    break
                if port == small.grpc_port:
                    accepted.append(time.time())

    try:
        with small.under_attack() as watch, repeated(renew, pause_seconds=1.0):
            watch.observe(on_top=lambda start, end: accept_seconds * sum(start <= at <= end for at in accepted))
    finally:
        for connection in itertools.chain.from_iterable(opened.values()):
            connection.close()
    assert "Too many open files" not in small.log


def test_a_clock_set_by_an_hour_costs_a_job_nothing(small: Bystander, clock: Path) -> None:
    with small.under_attack() as watch:
        offsets = itertools.cycle((HOUR, -HOUR, 0.0))
        with repeated(lambda: set_clock(clock, next(offsets)), pause_seconds=3.5):
            watch.observe()
        set_clock(clock, 0.0)
    wait_until(lambda: small.log.count("the clock was set by") >= 3, lambda: small.log)
    assert "hang" not in small.log
