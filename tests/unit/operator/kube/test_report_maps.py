from __future__ import annotations

import base64
import gzip
from collections.abc import Iterator
from typing import Any, cast

import pytest

from rankscope.analysis.collectives.hang_report import HangReport
from rankscope.operator.correlation import hang_store
from rankscope.operator.correlation.hang_store import HangStore
from rankscope.operator.kube.api_client import Api, ApiError, ConflictError, MissingError
from rankscope.operator.kube.report_maps import CONTENT_BYTES, KEY, ReportMaps

OWNERS = [{"apiVersion": "v1", "kind": "ServiceAccount", "name": "rankscope-operator", "uid": "u"}]
PATH = "/api/v1/namespaces/rankscope/configmaps"


class ConfigMaps:
    """An API server with ConfigMaps and nothing else."""

    def __init__(self) -> None:
        self.held: dict[str, dict[str, Any]] = {}
        self.error: Exception | None = None

    def create(self, path: str, body: Any) -> None:
        self._check()
        place = f"{path}/{body['metadata']['name']}"
        if place in self.held:
            raise ConflictError(409, "AlreadyExists", "there is one")
        self.held[place] = body

    def merge(self, path: str, body: Any) -> None:
        self.held[path]["binaryData"] |= body["binaryData"]

    def get(self, path: str) -> dict[str, Any]:
        self._check()
        return self.held[path]

    def delete(self, path: str) -> None:
        if self.held.pop(path, None) is None:
            raise MissingError(404, "NotFound", path)

    def pages(self, path: str, **query: str) -> Iterator[dict[str, Any]]:
        self._check()
        name, _, value = query["labelSelector"].partition("=")
        items = [one for one in self.held.values() if one["metadata"].get("labels", {}).get(name) == value]
        yield {"items": items}

    def _check(self) -> None:
        if self.error is not None:
            raise self.error


def report(number: int, **more: Any) -> HangReport:
    return HangReport(
        id=f"lab/h-20260301-101500-{number:06x}",
        run="lab/llama",
        headline="rank 1 in save",
        verdict="it hangs",
        world_size=2,
        began_unix_seconds=965.0,
        made_unix_seconds=1000.0 + number,
        **more,
    )


def ids(store: HangStore) -> list[str]:
    return [one.id for one in store.summaries(lambda run: True)]


def replicas(server: ConfigMaps, now: list[float]) -> list[HangStore]:
    files = ReportMaps(cast(Api, server), "rankscope", OWNERS)
    return [HangStore(files, lambda: 1000.0, lambda: now[0]) for _ in range(2)]


def test_replicas_find_and_remove_each_others_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_store, "MAX_REPORTS", 2)
    server, now = ConfigMaps(), [0.0]
    server.held[f"{PATH}/kube-root-ca.crt"] = {"metadata": {"name": "kube-root-ca.crt"}, "data": {}}
    one, other = replicas(server, now)
    assert (ids(one), ids(other)) == ([], [])
    one.keep(report(1))
    now[0] += hang_store.RELOAD_SECONDS
    assert all(one["metadata"].get("ownerReferences") == OWNERS for one in server.held.values() if "data" not in one)
    assert ids(other) == [report(1).id] and other.find(report(1).id) == report(1)
    one.keep(report(1, ended_unix_seconds=1100.0))
    found = other.find(report(1).id)
    assert found is not None and found.ended_unix_seconds == 1100.0
    for number in (2, 3):
        other.keep(report(number))
    now[0] += hang_store.RELOAD_SECONDS
    assert ids(one) == [report(number).id for number in (3, 2)]
    assert sorted(place.rpartition("/")[2] for place in server.held) == [
        "kube-root-ca.crt",
        "rankscope-h-20260301-101500-000002",
        "rankscope-h-20260301-101500-000003",
    ]


def test_a_refusing_api_server_loses_only_the_new_report(caplog: pytest.LogCaptureFixture) -> None:
    server, now = ConfigMaps(), [0.0]
    one, _ = replicas(server, now)
    one.keep(report(1))
    server.error = ApiError(403, "Forbidden", "no configmaps")
    with pytest.raises(OSError, match="no configmaps"):
        one.keep(report(2))
    now[0] += hang_store.RELOAD_SECONDS
    assert ids(one) == [report(1).id], "what is known stays known"
    assert one.find(report(1).id) is None
    assert "cannot be listed: the API server answered 403" in caplog.text


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        {KEY: "no base64"},
        {KEY: base64.b64encode(b"no gzip").decode()},
        {KEY: base64.b64encode(gzip.compress(b" " * (CONTENT_BYTES + 1))).decode()},
        {KEY: base64.b64encode(gzip.compress(b"{}")[:-9]).decode()},
    ],
)
def test_a_map_that_holds_no_report_is_left_out(data: dict[str, str] | None) -> None:
    server = ConfigMaps()
    one, _ = replicas(server, [0.0])
    one.keep(report(1))
    (kept,) = server.held.values()
    name = "rankscope-h-20260301-101500-000009"
    server.held[f"{PATH}/{name}"] = {**kept, "metadata": {**kept["metadata"], "name": name}, "binaryData": data}
    other, _ = replicas(server, [0.0])
    assert ids(other) == [report(1).id]
