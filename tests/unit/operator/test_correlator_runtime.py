"""A correlator with daemons that say what a test wants, on loopback."""

from __future__ import annotations

import http.client
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import grpc
import msgspec
import pytest

from rankscope.analysis.collectives.hang_report import HangReport
from rankscope.analysis.profiles.pprof import read_pprof
from rankscope.analysis.verdicts.verdict import Kind, Severity, Verdict
from rankscope.operator import correlator_runtime
from rankscope.operator.alerts.alert import Wanted
from rankscope.operator.captures import controller, daemon_calls
from rankscope.operator.certificates.folder import FleetRole, init, issue
from rankscope.operator.console_access import ConsoleSettings
from rankscope.operator.correlator_runtime import CorrelatorRuntime, CorrelatorSettings
from rankscope.operator.runs.daemon_sources import GivenDaemons
from rankscope.v1 import capture_service_pb2 as pb
from rankscope.v1 import profile_service_pb2
from rankscope.v1.capture_service_pb2_grpc import CaptureServiceStub
from rankscope.v1.job_service_pb2 import GetHangRequest, ListHangsRequest
from rankscope.v1.job_service_pb2_grpc import JobServiceStub
from rankscope.v1.profile_service_pb2_grpc import ProfileServiceStub
from tests.kube.scripted_daemon import PROFILE_SAMPLES, ScriptedDaemon, Spoken
from tests.support.waiting import wait_until

RUN = "exp#3-10_2"  # as Slurm may call an array task


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correlator_runtime, "tune_garbage_collection", lambda: None)  # of the tests' process
    monkeypatch.setattr(controller, "START_AHEAD_SECONDS", 3.0)
    monkeypatch.setattr(daemon_calls, "LAST_CALL_SECONDS", -600.0)  # the scripted daemons take a start that is over
    monkeypatch.setattr(daemon_calls, "WAITING_SECONDS", 0.5)


@pytest.fixture
def daemons() -> Iterator[list[ScriptedDaemon]]:
    made = [ScriptedDaemon(cast(Any, None), node) for node in ("node-a", "node-b")]
    for daemon, ranks in zip(made, ((0, 1), (2, 3)), strict=True):
        daemon.ranks = [Spoken("", rank, 4, RUN) for rank in ranks]
        daemon.recording_seconds = 0.2
        daemon.serve()
    yield made
    for daemon in made:
        daemon.silence()


@contextmanager
def correlator(folder: Path, daemons: list[ScriptedDaemon], **more: Any) -> Iterator[CorrelatorRuntime]:
    source = GivenDaemons([f"127.0.0.1:{daemon.port}" for daemon in daemons])
    runtime = CorrelatorRuntime(CorrelatorSettings([source], folder / "state", settling_seconds=0.0, **more))
    runtime.start()
    try:
        yield runtime
    finally:
        runtime.stop()


def nodes(runtime: CorrelatorRuntime) -> dict[int, str]:
    state = runtime.jobs.states_by_job().get(RUN)
    return {} if state is None else {rank: identity.node for rank, identity in state.identities.items()}


def all_report(runtime: CorrelatorRuntime) -> None:
    wait_until(lambda: nodes(runtime) == {0: "node-a", 1: "node-a", 2: "node-b", 3: "node-b"})


@contextmanager
def stub(runtime: CorrelatorRuntime) -> Iterator[CaptureServiceStub]:
    with grpc.insecure_channel(runtime.api_address) as channel:
        yield CaptureServiceStub(channel)


def test_ranks_of_all_daemons_form_one_capturable_run(tmp_path: Path, daemons: list[ScriptedDaemon]) -> None:
    with correlator(tmp_path, daemons) as runtime, stub(runtime) as user:
        all_report(runtime)
        # The only run need not be named.
        *_, last = user.StartCapture(pb.StartCaptureRequest(ranks="1,2", steps=3, id="mine"), timeout=60)
        assert last.capture.state == pb.CAPTURE_STATE_ANALYSED
        assert (last.capture.id, last.capture.job) == ("mine", RUN)
        assert {entry.rank: entry.node for entry in last.capture.ranks} == {1: "node-a", 2: "node-b"}
        assert [list(daemon.captures.values()) for daemon in daemons] == [[[1]], [[2]]]
        parts = user.DownloadArtifact(pb.DownloadArtifactRequest(id="mine", rank=2), timeout=60)
        assert sum(len(part.chunk) for part in parts) == 4096
        assert runtime.is_ready
        with pytest.raises(grpc.RpcError, match="no run other; next: rankscope top"):
            next(iter(user.StartCapture(pb.StartCaptureRequest(job="other", ranks="all", steps=3), timeout=60)))
        user.DeleteCapture(pb.DeleteCaptureRequest(id="mine"), timeout=60)
        wait_until(lambda: not user.ListCaptures(pb.ListCapturesRequest(), timeout=60).captures)
        assert all(daemon.deleted for daemon in daemons)


def test_profiles_and_stacks_of_a_run_come_from_all_daemons(tmp_path: Path, daemons: list[ScriptedDaemon]) -> None:
    daemons[0].ranks.append(Spoken("", 0, 1, "another"))
    daemons[1].shares = {3: {"load_image": 0.4}}
    with correlator(tmp_path, daemons) as runtime, grpc.insecure_channel(runtime.api_address) as channel:
        all_report(runtime)
        user = ProfileServiceStub(channel)
        selection = profile_service_pb2.ProfileSelection(job=RUN, ranks=[3], start_unix_nanos=5, end_unix_nanos=9)
        compared = user.CompareProfiles(profile_service_pb2.CompareProfilesRequest(selection=selection), timeout=60)
        assert (compared.excesses[0].function, list(compared.problems)) == ("load_image", [])
        parts = list(user.QueryProfile(profile_service_pb2.QueryProfileRequest(selection=selection), timeout=60))
        profile = read_pprof(b"".join(part.pprof for part in parts))
        assert {one.rank for one in profile} == {3} and profile.samples_total == PROFILE_SAMPLES
        assert {one.job for daemon in daemons for one in daemon.selections} == {RUN}
        with pytest.raises(grpc.RpcError, match="name a run with --run"):
            user.DumpStacks(profile_service_pb2.DumpStacksRequest(), timeout=60)
        dumped = user.DumpStacks(profile_service_pb2.DumpStacksRequest(job=RUN), timeout=60)
        assert {stack.rank: stack.node for stack in dumped.ranks if stack.frames} == nodes(runtime)
        with pytest.raises(grpc.RpcError, match="no run other; next: rankscope top"):
            user.DumpStacks(profile_service_pb2.DumpStacksRequest(job="other"), timeout=60)
        # A run that nobody reports now is asked for by its name everywhere.
        daemons[0].stored, daemons[1].stored = {"ended": [0]}, {"ended": [1], "other": [5]}
        selection = profile_service_pb2.ProfileSelection(job="ended", start_unix_nanos=5, end_unix_nanos=9)
        parts = list(user.QueryProfile(profile_service_pb2.QueryProfileRequest(selection=selection), timeout=60))
        assert {one.rank for one in read_pprof(b"".join(part.pprof for part in parts))} == {0, 1}
        selection.job = "never"
        with pytest.raises(grpc.RpcError, match="no run never; next: rankscope top"):
            list(user.QueryProfile(profile_service_pb2.QueryProfileRequest(selection=selection), timeout=60))


def test_a_hang_report_has_all_stacks_and_survives_a_restart(tmp_path: Path, daemons: list[ScriptedDaemon]) -> None:
    with correlator(tmp_path, daemons) as runtime, grpc.insecure_channel(runtime.api_address) as channel:
        all_report(runtime)
        hang = Verdict(Kind.HANG, "no rank advances", Severity.ALARM)
        runtime.jobs.hangs((replace(runtime.jobs.states_by_job()[RUN], verdict=hang),))
        user = JobServiceStub(channel)
        wait_until(lambda: user.ListHangs(ListHangsRequest(run=RUN), timeout=60).hangs)
        (listed,) = user.ListHangs(ListHangsRequest(), timeout=60).hangs
        report = msgspec.json.decode(user.GetHang(GetHangRequest(id=listed.id), timeout=60).report, type=HangReport)
        assert [(place.ranks, place.count) for place in report.places] == [("0-3", 4)]
        assert all(one.with_flight_recorder for daemon in daemons for one in daemon.dumps)
        assert runtime.jobs.hangs.hangs_of(RUN) == 1
    with correlator(tmp_path, daemons) as runtime, grpc.insecure_channel(runtime.api_address) as channel:
        assert [one.id for one in JobServiceStub(channel).ListHangs(ListHangsRequest(), timeout=60).hangs] == [
            listed.id
        ]


def test_a_restart_continues_a_capture_and_lists_what_ended(tmp_path: Path, daemons: list[ScriptedDaemon]) -> None:
    daemons[1].release.clear()
    with correlator(tmp_path, daemons) as runtime, stub(runtime) as user:
        all_report(runtime)
        request = pb.StartCaptureRequest(job=RUN, ranks="0,3", steps=3, id="mine")
        call = user.StartCapture(request, timeout=60)
        wait_until(lambda: all(daemon.captures for daemon in daemons))
        call.cancel()
    daemons[1].release.set()
    for _ in range(2):
        with correlator(tmp_path, daemons) as runtime, stub(runtime) as user:
            wait_until(lambda: runtime.captures.watched.listed.is_set())

            def states(user: CaptureServiceStub = user) -> list[tuple[str, int]]:
                captures = user.ListCaptures(pb.ListCapturesRequest(job=RUN), timeout=60).captures
                return [(capture.id, capture.state) for capture in captures]

            wait_until(lambda states=states: states() == [("mine", pb.CAPTURE_STATE_ANALYSED)])
    assert [len(daemon.captures) for daemon in daemons] == [1, 1]


def test_an_alert_captures_a_run_of_any_name_once(tmp_path: Path, daemons: list[ScriptedDaemon]) -> None:
    with correlator(tmp_path, daemons) as runtime:
        all_report(runtime)
        wanted = Wanted(RUN, (0, 3), frozenset({3}), "RankscopeStragglerRank", "firing-1")
        name = runtime._capture(wanted)
        assert name.startswith("exp-3-10-2-alert-")
        assert runtime._capture(wanted) == name
        wait_until(lambda: all(daemon.captures for daemon in daemons))
        assert daemons[1].starts[0].ranks == "3"


def test_a_second_daemon_with_a_nodes_name_is_ignored(tmp_path: Path, daemons: list[ScriptedDaemon]) -> None:
    twin = ScriptedDaemon(cast(Any, None), "node-b", [Spoken("", 3, 4, RUN, self_seconds=0.001)])
    twin.serve()
    try:
        with correlator(tmp_path, daemons) as first:
            all_report(first)
            addresses = {f"127.0.0.1:{daemon.port}" for daemon in (*daemons, twin)}
            first._pulse.stop()
            first.jobs.follow(addresses)
            wait_until(lambda: first.binding.refusals.counts.get("other_node", 0) > 0)
            assert first.daemons.addresses["node-b"] == f"127.0.0.1:{daemons[1].port}"
            # The name is free when its owner has gone.
            daemons[1].silence()
            wait_until(lambda: first.daemons.addresses["node-b"] == f"127.0.0.1:{twin.port}")
            daemons[1].serve()
    finally:
        twin.silence()


def test_a_daemon_cannot_take_over_a_rank_of_another_node(tmp_path: Path, daemons: list[ScriptedDaemon]) -> None:
    with correlator(tmp_path, daemons) as runtime:
        all_report(runtime)
        daemons[0].ranks.append(Spoken("", 3, 4, RUN, incarnation=7))
        wait_until(lambda: runtime.binding.refusals.counts.get("rank_taken", 0) > 2)
        assert nodes(runtime)[3] == "node-b"


def test_daemons_elsewhere_are_left_out_without_tls(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = CorrelatorSettings([GivenDaemons(["10.0.0.1", "127.0.0.1:1"])], tmp_path)
    runtime = CorrelatorRuntime(settings)
    followed: list[set[str]] = []
    monkeypatch.setattr(runtime.jobs, "follow", lambda addresses: followed.append(set(addresses)))
    runtime.listed.read(0)
    runtime._follow()
    runtime._follow()
    assert followed == [{"127.0.0.1:1"}] * 2
    assert caplog.text.count("there is no TLS: they are left out") == 1


def test_callers_are_known_by_their_certificates(tmp_path: Path) -> None:
    pki = init(tmp_path / "pki").folder
    other = init(tmp_path / "other").folder
    made = issue(pki, FleetRole.CORRELATOR, "head", ["127.0.0.1"]).folder
    files = (made / "tls.crt", made / "tls.key", made / "ca.crt")

    def code(shown: Path | None) -> str:
        pair = (None, None) if shown is None else ((shown / "tls.key").read_bytes(), (shown / "tls.crt").read_bytes())
        credentials = grpc.ssl_channel_credentials((pki / "ca.crt").read_bytes(), *pair)
        with grpc.secure_channel(runtime.api_address, credentials, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            try:
                CaptureServiceStub(channel).ListCaptures(pb.ListCapturesRequest(), timeout=20)
            except grpc.RpcError as error:
                return str(error.code().name)
        return "OK"

    def metrics_status(shown: Path | None) -> int:
        trust = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        if shown is not None:
            trust.load_cert_chain(shown / "tls.crt", shown / "tls.key")
        try:
            url = f"https://127.0.0.1:{runtime.server.port}/metrics"
            with urllib.request.urlopen(url, context=trust, timeout=20) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    with correlator(tmp_path, [], tls_files=files, metrics_tls=True) as runtime:
        wait_until(lambda: runtime.captures.watched.listed.is_set())
        assert code(issue(pki, FleetRole.CLIENT, "alice").folder) == "OK"
        assert code(made) == "OK"  # the correlator's own
        scraper = issue(pki, FleetRole.METRICS, "prometheus").folder
        assert code(scraper) == "UNAUTHENTICATED"
        assert [metrics_status(scraper), metrics_status(None)] == [200, 403]
        # Not for clients, of another authority, none.
        for shown in (
            issue(pki, FleetRole.DAEMON, "node-1").folder,
            issue(other, FleetRole.CLIENT, "eve").folder,
            None,
        ):
            assert code(shown) == "UNAVAILABLE"


def test_the_console_is_for_browsers_with_a_clients_certificate(tmp_path: Path) -> None:
    pki, other = (init(tmp_path / name).folder for name in ("pki", "other"))
    made = issue(pki, FleetRole.CORRELATOR, "head", ["127.0.0.1"]).folder
    files = (made / "tls.crt", made / "tls.key", made / "ca.crt")

    def answer(shown: Path | None, path: str = "runs", **headers: str) -> tuple[int, Any]:
        trust = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        if shown is not None:
            trust.load_cert_chain(shown / "tls.crt", shown / "tls.key")
        assert runtime.console is not None
        request = urllib.request.Request(f"{runtime.console.url}api/v1/{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, context=trust, timeout=20) as told:
                return told.status, msgspec.json.decode(told.read())
        except urllib.error.HTTPError as error:
            return error.code, msgspec.json.decode(error.read())

    console = ConsoleSettings("127.0.0.1", 0)
    with correlator(tmp_path, [], tls_files=files, console=console) as runtime:
        alice = issue(pki, FleetRole.CLIENT, "alice").folder
        assert answer(alice)[0] == 200
        assert answer(alice, Host="head.evil.example")[0] == 421
        assert answer(alice, Origin="https://evil.example")[0] == 403
        status, told = answer(issue(pki, FleetRole.METRICS, "prometheus").folder, **{"X-Forwarded-User": "alice"})
        assert status == 401 and "--role client" in told["error"]
        # A daemon's is for servers only.
        for shown in (None, issue(other, FleetRole.CLIENT, "eve").folder, issue(pki, FleetRole.DAEMON, "n1").folder):
            with pytest.raises((OSError, http.client.HTTPException)):
                answer(shown)


def test_without_tls_the_console_shows_runs_without_login(tmp_path: Path, daemons: list[ScriptedDaemon]) -> None:
    with correlator(tmp_path, daemons, console=ConsoleSettings("127.0.0.1", 0)) as runtime:
        all_report(runtime)
        assert runtime.console is not None

        def runs() -> list[str]:
            assert runtime.console is not None
            with urllib.request.urlopen(f"{runtime.console.url}api/v1/runs", timeout=20) as told:
                return [run["run"] for run in msgspec.json.decode(told.read())["runs"]]

        wait_until(lambda: runs() == [RUN])
    with pytest.raises(ValueError, match="no TLS"):
        CorrelatorRuntime(CorrelatorSettings([], tmp_path, console=ConsoleSettings("0.0.0.0", 0)))
