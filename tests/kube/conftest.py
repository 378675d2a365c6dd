"""One real API server for all tests of this folder; each test has a namespace of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankscope.operator.kube.api import Api
from rankscope.operator.kube.crds import KINDS, definition
from tests.kube.api_server import ApiServer

_NUMBERS = itertools.count(1)


def install_kinds(server: ApiServer) -> None:
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    for kind in KINDS:
        server.admin.create(path, definition(kind))
    for kind in KINDS:
        server.wait_for(lambda kind=kind: server.admin.is_served(f"/apis/rankscope.dev/v1alpha1/{kind.plural}"))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    made = ApiServer(tmp_path_factory.mktemp("kube"))
    made.start()
    try:
        install_kinds(made)
        yield made
    finally:
        made.stop()


@pytest.fixture
def namespace(server: ApiServer) -> str:
    name = f"test-{next(_NUMBERS)}"
    server.admin.create("/api/v1/namespaces", {"metadata": {"name": name}})
    return name


@pytest.fixture
def api(server: ApiServer, tmp_path: Path) -> Api:
    return Api(server.admin.kubeconfig(tmp_path / "kubeconfig"))
