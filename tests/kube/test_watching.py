from __future__ import annotations

import threading
from typing import Any

from rankscope.operator.kube.api_client import Api
from rankscope.operator.kube.watch_cache import Watched
from rankscope.operator.runs.pods import Pod, read_pod
from tests.kube.api_server import ApiServer
from tests.support.waiting import wait_until


class Notes:
    """Everything a watch told."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.deleted_names: list[str] = []
        self._lock = threading.Lock()

    def changed(self, uid: str, pod: Pod) -> None:
        with self._lock:
            self.names[uid] = pod.name

    def deleted(self, uid: str) -> None:
        with self._lock:
            self.deleted_names.append(self.names.pop(uid))


def pod(name: str) -> dict[str, Any]:
    containers = [{"name": "main", "image": "train"}]
    labels = {"training.kubeflow.org/job-name": "llama"}
    return {"metadata": {"name": name, "labels": labels}, "spec": {"containers": containers}}


def add(server: ApiServer, namespace: str, *names: str) -> None:
    for name in names:
        server.admin.create(f"/api/v1/namespaces/{namespace}/pods", pod(name))


def remove(server: ApiServer, namespace: str, name: str) -> None:
    server.admin.delete(f"/api/v1/namespaces/{namespace}/pods/{name}?gracePeriodSeconds=0")


def watch(api: Api, namespace: str, notes: Notes) -> Watched[Pod]:
    watched = Watched(api, f"/api/v1/namespaces/{namespace}/pods", read_pod, notes)
    watched.start()
    assert watched.listed.wait(60)
    return watched


def test_pods_that_come_and_go_are_told(server: ApiServer, namespace: str, api: Api) -> None:
    notes = Notes()
    add(server, namespace, "early")
    watched = watch(api, namespace, notes)
    add(server, namespace, "late")
    wait_until(lambda: set(notes.names.values()) == {"early", "late"})
    remove(server, namespace, "early")
    wait_until(lambda: notes.deleted_names == ["early"])
    assert [pod.name for pod in watched.objects.values()] == ["late"]
    watched.stop()


def test_an_outage_loses_nothing_and_pods_deleted_meanwhile_are_reported(
    namespace: str, api: Api, stoppable_server: ApiServer
) -> None:
    server, notes = stoppable_server, Notes()
    add(server, namespace, "stays", "leaves")
    watched = watch(api, namespace, notes)
    wait_until(lambda: len(notes.names) == 2)
    server.stop_api()
    wait_until(lambda: not watched.connected)
    assert len(watched.objects) == 2  # what is known stays known
    server.delete_behind_the_watch(f"/registry/pods/{namespace}/leaves")
    server.forget_history()
    server.start_api()
    add(server, namespace, "new")
    wait_until(lambda: sorted(notes.names.values()) == ["new", "stays"])
    assert notes.deleted_names == ["leaves"]
    watched.stop()
