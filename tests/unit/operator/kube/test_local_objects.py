from __future__ import annotations

import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rankscope.operator.kube import local_objects
from rankscope.operator.kube.api_client import ApiError, ConflictError, GoneError, MissingError
from rankscope.operator.kube.local_objects import LocalObjects
from rankscope.operator.kube.objects import CaptureObject, read_capture_object
from rankscope.operator.kube.watch_cache import Watched
from tests.support.waiting import wait_until

CAPTURES = "/apis/rankscope.dev/v1alpha1/captures"


@pytest.fixture
def objects(tmp_path: Path) -> Iterator[LocalObjects]:
    made = LocalObjects(tmp_path / "state")
    yield made
    made.close()


def made(objects: LocalObjects, name: str = "one", **metadata: Any) -> dict[str, Any]:
    spec = {"run": "llama-7", "ranks": "0", "steps": 3}
    return objects.create(CAPTURES, {"metadata": {"name": name, **metadata}, "spec": spec})


def listed(objects: LocalObjects) -> list[str]:
    return [item["metadata"]["name"] for page in objects.pages(CAPTURES) for item in page["items"]]


def test_an_object_is_read_like_one_of_an_api_server(objects: LocalObjects) -> None:
    thing = read_capture_object(made(objects))
    assert isinstance(thing, CaptureObject)
    assert (thing.namespace, thing.name, thing.job, thing.place) == ("", "one", "llama-7", "one")
    assert thing.path == f"{CAPTURES}/one"
    assert thing.capture_id == f"k-{thing.uid}"


def test_objects_outlive_a_restart_with_their_versions(tmp_path: Path) -> None:
    first = LocalObjects(tmp_path)
    version = made(first)["metadata"]["resourceVersion"]
    written = first.merge(f"{CAPTURES}/one/status", {"status": {"phase": "Succeeded"}})
    first.close()
    again = LocalObjects(tmp_path)
    (page,) = again.pages(CAPTURES)
    assert page["items"] == [written]
    assert int(written["metadata"]["resourceVersion"]) > int(version)
    assert int(made(again, "two")["metadata"]["resourceVersion"]) > int(written["metadata"]["resourceVersion"])
    again.close()


def test_only_the_owner_can_read_the_files(tmp_path: Path, objects: LocalObjects) -> None:
    made(objects)
    folder = tmp_path / "state"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_names_are_unique_and_become_no_paths(objects: LocalObjects) -> None:
    made(objects)
    with pytest.raises(ConflictError):
        made(objects)
    for name in ("../one", "a/b", "", ".x", "A", "x" * 300):
        with pytest.raises(ApiError):
            made(objects, name)


def test_a_write_of_what_has_changed_meanwhile_is_refused(objects: LocalObjects) -> None:
    before = made(objects)["metadata"]
    objects.merge(f"{CAPTURES}/one", {"metadata": {"annotations": {"a": "b"}, "uid": before["uid"]}})
    condition = {"metadata": {"resourceVersion": before["resourceVersion"]}}
    with pytest.raises(ConflictError):
        objects.merge(f"{CAPTURES}/one/status", {**condition, "status": {"phase": "Running"}})
    with pytest.raises(ConflictError):
        objects.delete(f"{CAPTURES}/one", {"preconditions": {"uid": "another"}})
    with pytest.raises(MissingError):
        objects.merge(f"{CAPTURES}/two", {})


def test_a_status_changes_nothing_else_and_null_removes_a_field(objects: LocalObjects) -> None:
    made(objects)
    path = f"{CAPTURES}/one/status"
    objects.merge(path, {"status": {"phase": "Running", "message": "waits"}, "spec": {"run": "other"}})
    after = objects.merge(path, {"status": {"message": None}, "metadata": {"name": "two"}})
    assert after["status"] == {"phase": "Running"}
    assert after["spec"]["run"] == "llama-7"
    assert listed(objects) == ["one"]


def test_a_finalizer_delays_the_deletion(objects: LocalObjects) -> None:
    made(objects, finalizers=["rankscope.dev/capture"])
    objects.delete(f"{CAPTURES}/one")
    (page,) = objects.pages(CAPTURES)
    assert page["items"][0]["metadata"]["deletionTimestamp"]
    objects.merge(f"{CAPTURES}/one", {"metadata": {"finalizers": []}})
    assert listed(objects) == []


def test_a_broken_file_is_skipped_and_others_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = LocalObjects(tmp_path)
    made(first)
    first.close()
    whole = (tmp_path / "captures-one.json").read_bytes()
    broken = {"a": b"", "b": whole[:40], "c": b"[]", "d": b'{"path": 1, "object": 2}', "moved": whole}
    for name, content in broken.items():
        (tmp_path / f"captures-{name}.json").write_bytes(content)
    again = LocalObjects(tmp_path)
    assert listed(again) == ["one"]
    assert caplog.text.count("is not read") == len(broken)
    again.close()


def test_a_second_process_cannot_use_the_folder(tmp_path: Path, objects: LocalObjects) -> None:
    with pytest.raises(OSError, match="in use by another process"):
        LocalObjects(tmp_path / "state")


def test_a_write_that_fails_changes_nothing(tmp_path: Path, objects: LocalObjects) -> None:
    made(objects)
    (tmp_path / "state" / "captures-one.new").mkdir()
    with pytest.raises(ApiError, match="captures-one"):
        objects.merge(f"{CAPTURES}/one/status", {"status": {"phase": "Running"}})
    (page,) = objects.pages(CAPTURES)
    assert "status" not in page["items"][0]


def test_the_number_of_objects_is_bounded(objects: LocalObjects, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_objects, "MAX_OBJECTS", 1)
    made(objects)
    with pytest.raises(ApiError, match="delete some"):
        made(objects, "two")


def test_a_watch_continues_a_list_and_tells_what_was_deleted(
    objects: LocalObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_objects, "WATCH_SECONDS", 180.0)
    made(objects)
    (page,) = objects.pages(CAPTURES)
    seen: list[tuple[str, str]] = []

    def watch() -> None:
        for event in objects.watch(CAPTURES, 180.0, resourceVersion=page["metadata"]["resourceVersion"]):
            seen.append((event["type"], event["object"]["metadata"]["name"]))
            if len(seen) == 3:
                return

    thread = threading.Thread(target=watch)
    thread.start()
    made(objects, "two")
    objects.merge(f"{CAPTURES}/two/status", {"status": {"phase": "Running"}})
    objects.delete(f"{CAPTURES}/one")
    thread.join(180)
    assert seen == [("ADDED", "two"), ("MODIFIED", "two"), ("DELETED", "one")]


def test_a_watch_older_than_the_history_must_list_again(objects: LocalObjects, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_objects, "HISTORY_EVENTS", 2)
    objects._events = type(objects._events)(maxlen=2)
    for number in range(4):
        made(objects, f"c{number}")
    with pytest.raises(GoneError):
        next(objects.watch(CAPTURES, 5.0, resourceVersion="1"))


def test_the_watch_cache_of_controllers_follows_it(objects: LocalObjects) -> None:
    class Follower:
        def changed(self, uid: str, thing: CaptureObject) -> None: ...

        def deleted(self, uid: str) -> None: ...

    made(objects)
    watched = Watched(objects, CAPTURES, read_capture_object, Follower())
    watched.start()
    try:
        made(objects, "two")
        wait_until(lambda: {thing.name for thing in watched.objects.values()} == {"one", "two"})
    finally:
        watched.stop()
