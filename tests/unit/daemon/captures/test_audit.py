from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from rankscope.daemon.captures.orders import CaptureError
from rankscope.daemon.captures.records import CaptureAudit
from rankscope.daemon.captures.runner import CaptureRunner
from rankscope.daemon.captures.service import CaptureServicer
from rankscope.daemon.captures.store import Store
from rankscope.v1 import capture_service_pb2 as pb
from tests.support.audit_records import Audited
from tests.support.waiting import wait_until
from tests.unit.daemon.captures.test_runner import MemoryArchive, ScriptedBackend, rank


def wait_for_the_end(conducted: CaptureRunner, archive: MemoryArchive, capture_id: str) -> None:
    *_, _last = conducted.records.follow(capture_id)
    wait_until(lambda: capture_id in archive.cleaned)  # its thread's last act


def test_a_capture_is_recorded_at_its_request_and_end(tmp_path: Path, audited: Audited) -> None:
    archive = MemoryArchive(tmp_path)
    backend = ScriptedBackend(failing={1: CaptureError("the process ended")})
    conducted = CaptureRunner("node-1", [backend], archive, lambda: [rank(0, world_size=2), rank(1, world_size=2)])
    request = pb.StartCaptureRequest(
        steps=3, ranks="all", reason="slow\nsince noon", options=pb.CaptureOptions(stacks=True)
    )
    capture_id = conducted.start(request, "unix:")
    wait_for_the_end(conducted, archive, capture_id)
    asked, ended = audited()
    for record in (asked, ended):
        del record["time"]
        assert record.pop("id") == capture_id
    who = {"via": "local", "user": f"uid {os.geteuid()}", "verified": True, "node": "node-1", "job": "job"}
    why = {"ranks": "0,1", "reason": "slow since noon"}
    assert asked == {"event": "asked", **who, **why, "steps": 3, "options": ["stacks"]}
    result = {"result": "analysed", "message": "1/2 ranks delivered; the process ended"}
    assert ended == {"event": "ended", **who, **why, **result}


@pytest.mark.parametrize(
    ("requested_by", "has_tls", "said"),
    [
        ("ipv4:10.0.0.3:4411", True, ("operator", "rankscope-operator", True)),
        ("ipv6:[::1]:4411", False, ("loopback", None, False)),
        ("unix:", True, ("local", f"uid {os.geteuid()}", True)),
        ("duty cycle", True, ("duty cycle", "rankscope-daemon", True)),
    ],
)
def test_it_is_told_how_and_by_whom(
    requested_by: str, has_tls: bool, said: tuple[str, str | None, bool], audited: Audited
) -> None:
    CaptureAudit("n", has_tls).ended(pb.Capture(id="c", requested_by=requested_by, state=pb.CAPTURE_STATE_FAILED))
    (record,) = audited()
    assert (record["via"], record.get("user"), record["verified"]) == said


class _Context:
    def peer(self) -> str:
        return "unix:"

    def abort(self, code: grpc.StatusCode, text: str) -> None:
        raise RuntimeError(text)


def test_a_refused_request_is_recorded_with_the_reason(tmp_path: Path, audited: Audited) -> None:
    conducted = CaptureRunner("node-1", [ScriptedBackend()], MemoryArchive(tmp_path), list)
    request = pb.StartCaptureRequest(job="bert", seconds=float("nan"), ranks="0", reason="why")
    with pytest.raises(RuntimeError):
        next(CaptureServicer(conducted, Store(tmp_path / "s")).StartCapture(request, cast(Any, _Context())))
    (record,) = audited()
    assert (record["event"], record["job"], record["ranks"], record["reason"]) == ("refused", "bert", "0", "why")
    assert "no run 'bert'" in record["message"] and "seconds" not in record


def test_a_capture_ended_by_a_restart_has_its_last_record(tmp_path: Path, audited: Audited) -> None:
    before = Store(tmp_path)
    before.save(pb.Capture(id="c-1", job="bert", state=pb.CAPTURE_STATE_RUNNING, ranks=[pb.RankCapture(rank=4)]))
    before.close()
    for _ in range(2):
        after = Store(tmp_path, on_lost=CaptureAudit("n", has_tls=True).ended)
        after.load()
        after.close()
    (record,) = audited()
    assert (record["event"], record["id"], record["result"]) == ("ended", "c-1", "failed")
    assert "the daemon restarted during this capture" in record["message"]
