from __future__ import annotations

from collections.abc import Iterator

import grpc
import msgspec
import pytest

from rankscope.analysis.collectives.hang_report import HangReport
from rankscope.analysis.verdicts.verdict import Cause, Confidence, Kind, Severity, Verdict
from rankscope.operator.access import run_service, token_review
from rankscope.operator.correlation.correlator import JobState
from rankscope.operator.correlation.job_service import verdict_of
from rankscope.operator.kube.objects import RunObject, read_run_object
from rankscope.v1.identity_pb2 import RankIdentity
from rankscope.v1.job_service_pb2 import GetHangRequest, ListHangsRequest, ListJobsRequest, WatchJobsRequest
from rankscope.v1.job_service_pb2_grpc import JobServiceStub
from rankscope.v1.window_pb2 import FrameShare, RankWindow, StackSummary, Stall
from tests.support.audit_records import Audited
from tests.unit.operator.access.fake_cluster import Cluster, refusal

Code = grpc.StatusCode


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    made.states = [held("lab/llama"), held("other/secret")]
    yield made
    made.server.stop()


def held(job: str) -> JobState:
    window = RankWindow(
        identity=RankIdentity(job=job, rank=3, node="gpu-1"),
        stacks=StackSummary(samples=9, frames=[FrameShare(function="secret", file="model.py", line=1, share=1)]),
        stall=Stall(seconds_since_step=40, stack=["secret (model.py:1)"]),
    )
    verdict = Verdict(Kind.HEALTHY, "all ranks keep up")
    return JobState(job, 4, verdict, 0, 0, 4, 0.5, None, None, (window,))


def of_another_replica(namespace: str, phase: str = "Running") -> RunObject:
    verdict = {
        "kind": "slow_rank",
        "severity": "alarm",
        "confidence": "high",
        "reason": "rank 2 is slow",
        "since": "2026-03-01T10:00:00Z",
        "culprits": [{"rank": 2, "node": "gpu-2"}],
        "phase": "forward",
        "source": "/srv/model.py:88 (normalize)",
        "impactRatio": 0.4,
        "lostGpuHours": 2.0,
    }
    status = {"phase": phase, "ranks": {"expected": 8, "seen": 8, "summary": "8/8"}, "stepSeconds": 0.2}
    metadata = {"namespace": namespace, "name": "bert", "uid": f"uid-{namespace}-{phase}"}
    made = read_run_object({"metadata": metadata, "status": {**status, "verdict": verdict}})
    assert made is not None
    return made


def jobs(cluster: Cluster, token: str | None = None) -> JobServiceStub:
    channel = grpc.insecure_channel(f"127.0.0.1:{cluster.server.port}", [("grpc.use_local_subchannel_pool", 1)])
    if token is None:
        return JobServiceStub(channel)
    return JobServiceStub(grpc.intercept_channel(channel, type(cluster).showing(token)))


def refused_watch(stub: JobServiceStub, run: str) -> grpc.StatusCode:
    return refusal(lambda: stub.WatchJobs(WatchJobsRequest(run=run), timeout=30)).code()


def test_runs_are_listed_where_the_caller_may_list_them(cluster: Cluster) -> None:
    ada = jobs(cluster, cluster.may("ada", "list", namespace="lab"))
    assert [job.job for job in ada.ListJobs(ListJobsRequest(run="lab/"), timeout=30).jobs] == ["lab/llama"]
    assert [job.job for job in ada.ListJobs(ListJobsRequest(run="lab/llama"), timeout=30).jobs] == ["lab/llama"]
    assert list(ada.ListJobs(ListJobsRequest(run="lab/other"), timeout=30).jobs) == []
    for wanted in ("other/", "other/secret", ""):
        assert refused_watch(ada, wanted) is Code.PERMISSION_DENIED
    assert refused_watch(jobs(cluster), "lab/") is Code.UNAUTHENTICATED
    root = jobs(cluster, cluster.may("root", "list", namespace=""))
    assert [job.job for job in root.ListJobs(ListJobsRequest(), timeout=30).jobs] == ["lab/llama", "other/secret"]


def test_a_list_has_ranks_and_nodes_but_no_code(cluster: Cluster) -> None:
    stub = jobs(cluster, cluster.may("ada", "list"))
    (job,) = stub.ListJobs(ListJobsRequest(run="lab/"), timeout=30).jobs
    assert [(window.identity.rank, window.identity.node) for window in job.ranks] == [(3, "gpu-1")]
    assert job.ranks[0].stall.seconds_since_step == 40
    assert b"secret" not in job.SerializeToString()


def test_runs_of_other_replicas_come_from_objects_until_their_end(cluster: Cluster) -> None:
    cluster.run_objects = [of_another_replica("lab"), of_another_replica("lab", "Ended"), of_another_replica("other")]
    stub = jobs(cluster, cluster.may("ada", "list"))
    own, theirs = stub.ListJobs(ListJobsRequest(run="lab/"), timeout=30).jobs
    assert (own.job, theirs.job, theirs.world_size, theirs.step_seconds) == ("lab/llama", "lab/bert", 8, 0.2)
    verdict = verdict_of(theirs.verdict)
    assert (verdict.kind, verdict.severity, verdict.confidence) == (Kind.SLOW_RANK, Severity.ALARM, Confidence.HIGH)
    assert (verdict.culprits, verdict.impact_ratio, verdict.lost_gpu_seconds) == ((2,), 0.4, 7200)
    frame = verdict.cause.frames[0]
    assert (frame.file, frame.line, frame.function) == ("/srv/model.py", 88, "normalize")
    assert verdict.cause == Cause("forward", verdict.cause.frames)


def test_a_watch_shows_changes_and_ends_when_the_permission_does(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_service, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr(run_service, "RECHECK_SECONDS", 0.1)
    monkeypatch.setattr(token_review, "YES_SECONDS", 0.0)
    stream = jobs(cluster, cluster.may("ada", "list")).WatchJobs(WatchJobsRequest(run="lab/"), timeout=60)
    assert [job.job for job in next(stream).jobs] == ["lab/llama"]
    cluster.states = [held("lab/new")]
    assert any([job.job for job in answer.jobs] == ["lab/new"] for answer in stream)
    cluster.rights.clear()
    assert refusal(lambda: stream).code() is Code.PERMISSION_DENIED


def hang_of(namespace: str) -> HangReport:
    return HangReport(
        id=f"{namespace}/h-20260301-101500-{'0a1b2c' if namespace == 'lab' else '0a1b2d'}",
        run=f"{namespace}/llama",
        headline="rank 1 in save_checkpoint (ckpt.py:51)",
        verdict="no rank has advanced for 35 s",
        world_size=2,
        began_unix_seconds=965.5,
        made_unix_seconds=1000.0,
    )


def test_hang_reports_need_profile_access_and_each_read_is_audited(
    cluster: Cluster, audited: Audited, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankscope.operator.correlation.hang_store.KEPT_SECONDS", float("inf"))
    own, foreign = hang_of("lab"), hang_of("other")
    for report in (own, foreign):
        cluster.hangs.keep(report)
    ada = jobs(cluster, cluster.may("ada", "get/artifacts", namespace="lab"))
    (listed,) = ada.ListHangs(ListHangsRequest(run="lab/llama"), timeout=30).hangs
    assert (listed.id, listed.run, listed.headline) == (own.id, own.run, own.headline)
    assert (listed.began_unix_nanos, listed.made_unix_nanos, listed.ended_unix_nanos) == (9655 * 10**8, 10**12, 0)
    assert not ada.ListHangs(ListHangsRequest(run="lab/other"), timeout=30).hangs
    content = ada.GetHang(GetHangRequest(id=own.id), timeout=30).report
    assert msgspec.json.decode(content, type=HangReport) == own
    for wanted in ("other/", "other/llama", ""):
        error = refusal(lambda w=wanted: ada.ListHangs(ListHangsRequest(run=w), timeout=30))
        assert error.code() is Code.PERMISSION_DENIED
    for wanted, code in (
        (foreign.id, Code.PERMISSION_DENIED),
        ("other/h-20260301-101500-000000", Code.PERMISSION_DENIED),
        ("lab/h-20260301-101500-000000", Code.NOT_FOUND),
        (f"lab/{foreign.id.partition('/')[2]}", Code.NOT_FOUND),
        ("lab/../../etc", Code.INVALID_ARGUMENT),
        ("", Code.INVALID_ARGUMENT),
    ):
        assert refusal(lambda w=wanted: ada.GetHang(GetHangRequest(id=w), timeout=30)).code() is code, wanted
    bob = jobs(cluster, cluster.may("bob", "list", "get", "create"))
    assert refusal(lambda: bob.GetHang(GetHangRequest(id=own.id), timeout=30)).code() is Code.PERMISSION_DENIED
    lines = audited()
    read = [(line["user"], line["run"], line.get("id")) for line in lines if line["event"] == "downloaded"]
    assert read == [("ada", "llama", None), ("ada", "other", None), ("ada", "llama", own.id)]
    assert {line["what"] for line in lines if line["event"] == "downloaded"} == {"hang"}
