"""Copies files to an object store or a shared directory, by fsspec URL (s3://…, gs://…, file://…), with retries.

The clients of object stores need a hundred megabytes and seconds to import: they are imported when they are used."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from rankscope.common.text import one_line

ATTEMPTS: Final = 5
FIRST_PAUSE_SECONDS: Final = 1.0
MAX_MESSAGE_CHARACTERS: Final = 300
# Retrying does not help: no such bucket, no permission, no client for this kind of URL, a bad URL.
_HOPELESS: Final = (PermissionError, FileNotFoundError, NotADirectoryError, ImportError, ValueError)

# On these, creating a directory would create a bucket, which needs a permission that a writer should not have. They
# show objects only when complete.
_WITHOUT_FOLDERS: Final = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci", "r2"})


class UploadError(Exception):
    """Why a file was not uploaded; without secrets that its URL may contain."""


def check_store(url: str) -> None:
    """Raises UploadError if nothing could be uploaded there from this installation. The store is not asked."""
    try:
        if not urlsplit(url).scheme:
            raise ValueError("must be a URL, as in s3://bucket/folder")
        _store(url)
    except Exception as error:  # every store has its own errors
        raise UploadError(_why(error, url)) from error


def shown(url: str) -> str:
    """The URL without secrets."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "(no URL)"
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


def _store(url: str) -> tuple[Any, str]:
    """The client, and the path in its store."""
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise ImportError("fsspec is not installed; pip install 'rankscope[upload]'") from error
    # Without cached listings: changes by other attempts or by users must be seen.
    store, target = url_to_fs(url, skip_instance_cache=True, use_listings_cache=False)
    return store, target


def _send(path: Path, url: str) -> None:
    store, target = _store(url)
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
    secret = url.partition("://")[2].partition("/")[0].rpartition("@")[0]
    for hidden in filter(None, (secret, *secret.split(":"))):
        text = text.replace(hidden, "…")
    return one_line(f"{shown(url)}: {type(error).__name__}: {text}", MAX_MESSAGE_CHARACTERS)
