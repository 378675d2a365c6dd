"""Names that lead elsewhere, in every text of every request: nothing is read or written there, and nothing is told."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import grpc
import pytest

from tests.security.attacked import PATIENCE_SECONDS, SECRET, SECRET_JOB, Attacked
from tests.security.request_fields import TextField, known_services, text_fields
from tests.security.test_strangers import methods

TRICKS = (
    "../canary",
    "../../../../../../../../etc/passwd",
    "/etc/passwd",
    "c-1/../../canary",
    "..",
    ".",
    "~root/.ssh/id_rsa",
    "c-1\x00../canary",
    "c-1\n2000-01-01T00:00:00 error forged: a line",
    "c-1\r2000-01-01T00:00:00 error forged",
    "\x1b[2J\x1b]0;owned\x07",
    "..\\..\\canary",
    "%2e%2e%2fcanary",
    "..\u2215canary\u202e\ufeff",
    "file:///etc/passwd",
    "s3://bucket/../canary",
    "$(touch canary)`touch canary`; touch canary",
    "{0.__class__.__mro__}%s%n",
    "a" * 255,
    "a/" * 2048,
    "0-999999999," * 300,
    "x" * 60_000,
)
ALLOWED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.NOT_FOUND,
}
HONEST: tuple[dict[str, object], ...] = (
    {},
    {"job": SECRET_JOB, "ranks": "0", "seconds": 1.0, "lease_seconds": 60.0, "patience_seconds": 1.0},
)
FIELDS = list(text_fields())


def answer(channel: grpc.Channel, field: TextField, request: bytes) -> tuple[grpc.StatusCode, str]:
    call = channel.unary_stream(f"/{field.method.containing_service.full_name}/{field.method.name}")
    stream = call(request, timeout=PATIENCE_SECONDS)
    try:
        next(stream, None)
    except grpc.RpcError as error:
        return error.code(), error.details() or ""
    finally:
        stream.cancel()
    return grpc.StatusCode.OK, ""


def tree(folder: Path) -> set[tuple[str, int]]:
    """Of all that is not a capture's own folder: names and sizes."""
    found = set()
    for path in folder.rglob("*"):
        if "captures" not in path.relative_to(folder).parts[1:] and path.name != "log":
            found.add((str(path), path.lstat().st_size if path.is_file() else 0))
    return found


def test_every_service_that_is_served_is_attacked(attacked: Attacked) -> None:
    served = {method.split("/")[1] for method in methods(attacked)}
    assert {name for name in served if name.startswith("rankscope.")} == known_services()


@pytest.mark.parametrize("field", FIELDS, ids=str)
def test_a_text_that_leads_elsewhere_leads_nowhere(attacked: Attacked, field: TextField) -> None:
    canary = attacked.captures.parent / "canary"
    canary.write_text("untouched")
    os.utime(canary, (0, 0))
    before = tree(attacked.folder)
    with attacked.channel(attacked.operator) as channel:
        for trick, honest in itertools.product(TRICKS, HONEST):
            code, text = answer(channel, field, field.request(trick, honest).SerializeToString())
            assert code in ALLOWED, (trick[:60], code, text)
            assert len(text) < 2000
            for leak in (str(attacked.folder), "Traceback", ".py", "root:", "Errno", "\n", "\x00", "\x1b"):
                assert leak not in text, (trick[:60], text)
            if field.path[-1].name == "job":  # another one than is there
                assert SECRET not in text, text
        huge = field.request("x" * 70_000, {}).SerializeToString()
        assert answer(channel, field, huge)[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (canary.read_text(), canary.stat().st_mtime) == ("untouched", 0)
    assert tree(attacked.folder) == before
    assert not Path("canary").exists()
    for folder in attacked.captures.iterdir():
        assert folder.name.startswith((".", "c-", "a")), folder


def test_numbers_that_are_no_ranks_and_no_offsets_are_refused(attacked: Attacked) -> None:
    field = next(field for field in FIELDS if field.method.name == "DownloadArtifact")
    with attacked.channel(attacked.operator) as channel:
        for name, value in (("rank", 2**31 - 1), ("rank", -1), ("offset", 2**63 - 1), ("window", 2**31 - 1)):
            request = field.request("c-1", {name: value})
            code, text = answer(channel, field, request.SerializeToString())
            assert code is grpc.StatusCode.NOT_FOUND, (name, code, text)
