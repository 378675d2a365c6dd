"""Uploads artifacts to an object store or a shared directory.

Runs in a separate process (`python -m rankscope.daemon.captures.processing.upload FOLDER`): the clients of object
stores need a hundred megabytes and seconds to import, and may hang. The directory holds the order; the process
writes an answer for each file."""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path
from typing import Final

import msgspec

from rankscope.common.object_store import UploadError, upload
from rankscope.daemon.captures.processing.messages import leave
from rankscope.daemon.captures.processing.sandbox import confine

MAX_MEMORY_BYTES: Final = 4 << 30
MAX_CPU_SECONDS: Final = 600
MAX_JOB_LENGTH: Final = 80
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]")


class Upload(msgspec.Struct, frozen=True):
    rank: int
    path: str
    url: str


class Order(msgspec.Struct, frozen=True):
    uploads: list[Upload]


class Uploaded(msgspec.Struct, frozen=True):
    error: str = ""


for _kind in (Order, Uploaded):
    msgspec.json.Decoder(_kind)  # before there are threads, as in messages.py


def order_file(folder: Path) -> Path:
    return folder / "uploads.json"


def answer_file(folder: Path, number: int) -> Path:
    """The answer file of an upload, by its position in the order."""
    return folder / f"upload{number}.json"


def target_url(base_url: str, job: str, capture_id: str, name: str) -> str:
    """All ranks of a job's capture are stored together, on whichever node they ran. A job's name comes from the
    container: it becomes one plain path component."""
    safe = _UNSAFE.sub("_", job)[:MAX_JOB_LENGTH]
    if safe != job or not safe.strip("."):
        safe = f"{safe.strip('.')}-{hashlib.sha256(job.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"
    return "/".join((base_url.rstrip("/"), safe, capture_id, name))


def main(folder: Path) -> None:
    confine(memory_bytes=MAX_MEMORY_BYTES, cpu_seconds=MAX_CPU_SECONDS, file_bytes=MAX_MEMORY_BYTES)
    order = msgspec.json.decode(order_file(folder).read_bytes(), type=Order)
    for number, one in enumerate(order.uploads):
        try:
            upload(Path(one.path), one.url)
            answer = Uploaded()
        except UploadError as error:
            answer = Uploaded(str(error))
        leave(answer_file(folder, number), answer)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
