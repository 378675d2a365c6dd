"""Reports of hangs in ConfigMaps of the operator's namespace, where every replica finds them."""

from __future__ import annotations

import base64
import binascii
import gzip
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rankscope.operator.kube.api_client import Api, ApiError, ConflictError, Document, MissingError, UnreachableError
from rankscope.operator.kube.objects import MANAGED

LABEL = "rankscope.dev/report"
KIND = "hang"
KEY = "report.json.gz"
CONTENT_BYTES = 1 << 20
_PREFIX = "rankscope-"


class ReportMaps:
    """Any thread. Raises OSError."""

    is_shared = True

    def __init__(self, api: Api, namespace: str, owners: Sequence[Document] = ()) -> None:
        self._api = api
        self._owners = list(owners)
        self._namespace = namespace
        self._path = f"/api/v1/namespaces/{namespace}/configmaps"

    def all(self) -> Iterator[tuple[str, bytes]]:
        with _as_os_errors():
            for page in self._api.pages(self._path, labelSelector=f"{LABEL}={KIND}"):
                for item in page.get("items") or ():
                    yield str(item["metadata"]["name"]).removeprefix(_PREFIX), _content(item)

    def read(self, name: str) -> bytes:
        with _as_os_errors():
            return _content(self._api.get(f"{self._path}/{_PREFIX}{name}"))

    def write(self, name: str, content: bytes) -> None:
        data = {KEY: base64.b64encode(gzip.compress(content, mtime=0)).decode()}
        labels = {**MANAGED, LABEL: KIND}
        metadata: Document = {"name": f"{_PREFIX}{name}", "namespace": self._namespace, "labels": labels}
        if self._owners:
            metadata["ownerReferences"] = self._owners
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "binaryData": data}
        with _as_os_errors():
            try:
                self._api.create(self._path, body)
            except ConflictError:
                self._api.merge(f"{self._path}/{_PREFIX}{name}", {"binaryData": data})

    def remove(self, name: str) -> None:
        with _as_os_errors():
            try:
                self._api.delete(f"{self._path}/{_PREFIX}{name}")
            except MissingError:
                return

    def close(self) -> None:
        """Nothing is held."""


def _content(document: Document) -> bytes:
    """Empty where there is none, or more than is ever written."""
    try:
        data = base64.b64decode(document["binaryData"][KEY])
        opened = zlib.decompressobj(wbits=31)
        content = opened.decompress(data, CONTENT_BYTES)
        return content if opened.eof else b""
    except (KeyError, TypeError, binascii.Error, zlib.error):
        return b""


@contextmanager
def _as_os_errors() -> Iterator[None]:
    try:
        yield
    except (ApiError, UnreachableError) as error:
        raise OSError(str(error)) from error
