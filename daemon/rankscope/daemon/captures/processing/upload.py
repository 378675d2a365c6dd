"""Uploads artifacts to an object store or a shared directory, by fsspec URL (s3://…, gs://…, file://…), with retries.

Runs in a separate process (`python -m rankscope.daemon.captures.processing.upload FOLDER`): the clients of object
stores need a hundred megabytes and seconds to import, and may hang. The directory holds the order; the process
writes an answer for each file."""

from __future__ import annotations

import hashlib
import random
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit, urlunsplit

import msgspec

from rankscope.common.text import one_line
from rankscope.daemon.captures.processing.messages import leave
from rankscope.daemon.captures.processing.sandbox import confine

ATTEMPTS: Final = 5
FIRST_PAUSE_SECONDS: Final = 1.0
MEMORY_LIMIT_BYTES: Final = 4 << 30
CPU_LIMIT_SECONDS: Final = 600
JOB_LENGTH_LIMIT: Final = 80
MESSAGE_LIMIT: Final = 300
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]")
# Retrying does not help: no such bucket, no permission, no client for this kind of URL, a bad URL.
_HOPELESS: Final = (PermissionError, FileNotFoundError, NotADirectoryError, ImportError, ValueError)

# On these, creating a directory would create a bucket, which needs a permission that a writer should not have. They
# show objects only when complete.
_WITHOUT_FOLDERS: Final = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci", "r2"})


class UploadError(Exception):
    """Why a file was not uploaded; without secrets that its URL may contain."""


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
    safe = _UNSAFE.sub("_", job)[:JOB_LENGTH_LIMIT]
    if safe != job or not safe.strip("."):
        safe = f"{safe.strip('.')}-{hashlib.sha256(job.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"
    return "/".join((base_url.rstrip("/"), safe, capture_id, name))


def shown(url: str) -> str:
    """The URL without secrets."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def upload(path: Path, url: str, *, sleep: Callable[[float], None] = time.sleep) -> None:
    """Raises UploadError when all attempts have failed, or one failed permanently."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            _send(path, url)
            return
        except _HOPELESS as error:
            raise UploadError(_why(error, url)) from error
        except Exception as error:  # every store has its own errors, and most of them are temporary
            if attempt == ATTEMPTS:
                raise UploadError(f"{_why(error, url)} ({ATTEMPTS} attempts)") from error
        sleep(FIRST_PAUSE_SECONDS * 2 ** (attempt - 1) * random.uniform(0.5, 1.0))


def _send(path: Path, url: str) -> None:
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise ImportError("fsspec is not installed; pip install 'rankscope[upload]'") from error
    # Without cached listings: changes by other attempts or by users must be seen.
    store, target = url_to_fs(url, skip_instance_cache=True, use_listings_cache=False)
    protocols = {store.protocol} if isinstance(store.protocol, str) else set(store.protocol)
    if protocols & _WITHOUT_FOLDERS:
        store.put_file(str(path), target)
    else:
        store.makedirs(target.rpartition("/")[0], exist_ok=True)
        # Readers must not find half a file.
        store.put_file(str(path), f"{target}.part")
        store.mv(f"{target}.part", target)
    try:
        arrived = store.info(target)["size"]
    except PermissionError:
        return  # a writer need not have read permission
    if arrived != path.stat().st_size:
        raise OSError(f"{arrived} bytes arrived of {path.stat().st_size}")


def _why(error: Exception, url: str) -> str:
    text = str(error)
    secret = urlsplit(url).netloc.rpartition("@")[0]
    for hidden in filter(None, (secret, *secret.split(":"))):
        text = text.replace(hidden, "…")
    return one_line(f"{shown(url)}: {type(error).__name__}: {text}", MESSAGE_LIMIT)


def main(folder: Path) -> None:
    confine(memory_bytes=MEMORY_LIMIT_BYTES, cpu_seconds=CPU_LIMIT_SECONDS, file_bytes=MEMORY_LIMIT_BYTES)
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
