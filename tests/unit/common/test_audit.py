from __future__ import annotations

import json

from rankscope.common.audit import AuditRecord, audit_line


def test_a_record_tells_who_what_why_and_how_it_ended() -> None:
    record = AuditRecord(
        "ended",
        "api",
        user="ada",
        groups=("team",),
        verified=True,
        namespace="lab",
        run="pytorchjob-llama",
        ranks="0,2",
        steps=3,
        reason="slow since noon",
        result="Succeeded",
    )
    assert json.loads(audit_line(record, 1_763_200_000.5)) == {
        "time": "2025-11-15T09:46:40.500Z",
        "event": "ended",
        "via": "api",
        "user": "ada",
        "groups": ["team"],
        "verified": True,
        "namespace": "lab",
        "run": "pytorchjob-llama",
        "ranks": "0,2",
        "steps": 3,
        "reason": "slow since noon",
        "result": "Succeeded",
    }


def test_no_field_can_end_the_line_or_hide_text() -> None:
    evil = 'x"}\n{"event": "ended"}\r\u2028\u202e\x1b[2J\x00\ud800'
    fields = ("user", "address", "node", "namespace", "run", "job", "capture", "id", "ranks", "reason", "message")
    record = AuditRecord("asked", "local", groups=(evil,), result=evil, **dict.fromkeys(fields, evil))
    line = audit_line(record, 0.0)
    assert line.isascii() and line.isprintable()
    assert json.loads(line)["reason"] == evil


def test_a_line_has_an_end_whatever_was_written() -> None:
    long = "\U0001f600" * 100_000
    record = AuditRecord("asked", "local", user=long, groups=(long,) * 1000, reason=long, message=long)
    line = audit_line(record, 0.0)
    assert len(line) < 200_000
    said = json.loads(line)
    assert len(said["user"]) == 256 and len(said["groups"]) == 32 and len(said["reason"]) == 1024


def test_what_is_no_number_is_left_out() -> None:
    assert "seconds" not in json.loads(audit_line(AuditRecord("asked", "local", seconds=float("nan")), 0.0))
