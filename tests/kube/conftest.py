"""One real API server for all tests of this folder; each test has a namespace of its own."""

from __future__ import annotations

import contextlib
import itertools
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rankscope.operator.kube.api_client import Api
from rankscope.operator.kube.crds import KINDS, definition
from tests.kube.accounts import ACCOUNTS, DAEMON, OPERATOR, install_roles
from tests.kube.api_server import ApiServer, User
from tests.kube.operator_process import OperatorProcess
from tests.kube.scripted_daemon import ScriptedDaemon
from tests.support.waiting import wait_until

_NUMBERS = itertools.count(1)
LOG_CHARACTERS = 8000
# Their tests wait for leases and restarts.
LONGEST = ("test_restarts.py", "test_outage.py", "test_policies.py", "test_fleet.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first: no process has one left when the others are done."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


def install_kinds(server: ApiServer) -> None:
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    for kind in KINDS:
        server.admin.create(path, definition(kind))
    for kind in KINDS:
        wait_until(lambda kind=kind: server.admin.is_served(f"/apis/rankscope.dev/v1alpha1/{kind.plural}"))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    made = ApiServer(tmp_path_factory.mktemp("kube"), ACCOUNTS)
    made.start()
    try:
        install_kinds(made)
        install_roles(made)
        yield made
    finally:
        made.stop()


@pytest.fixture
def stoppable_server(server: ApiServer) -> Iterator[ApiServer]:
    """The same one, for tests that stop it: it runs again when they are done, whatever became of them.

    Ask for it last, so that other fixtures find it running when they clear away."""
    yield server
    if not server.is_running:
        server.start_api()


@pytest.fixture
def namespace(server: ApiServer) -> str:
    name = f"test-{next(_NUMBERS)}"
    server.admin.create("/api/v1/namespaces", {"metadata": {"name": name}})
    return name


@pytest.fixture
def api(server: ApiServer, tmp_path: Path) -> Api:
    return Api(server.admin.kubeconfig(tmp_path / "kubeconfig"))


@pytest.fixture(scope="session")
def operator_user(server: ApiServer) -> User:
    """The operator's service account, with the chart's roles and no others."""
    return server.user(OPERATOR)


@pytest.fixture(scope="session")
def daemon_user(server: ApiServer) -> User:
    return server.user(DAEMON)


# For operators that are not restarted: nothing that stood before has to be kept.
QUICK = ("--settling-seconds", "5")
StartOperator = Callable[..., OperatorProcess]
StartDaemon = Callable[..., ScriptedDaemon]


@pytest.fixture
def start_operator(operator_user: User, tmp_path: Path) -> Iterator[StartOperator]:
    """Operators that end with the test, whatever became of them."""
    started: list[OperatorProcess] = []

    def start(identity: str = "operator-0", *flags: str) -> OperatorProcess:
        operator = OperatorProcess(operator_user, tmp_path, identity, flags)
        operator.start()
        started.append(operator)
        return operator

    yield start
    statuses = {operator.identity: operator.process.poll() for operator in started}
    for operator in started:
        with contextlib.suppress(OSError):  # it was killed, or serves its metrics to others only
            metrics = [line for line in operator.get("/metrics").splitlines() if line.startswith("rankscope_operator_")]
            print(f"metrics of {operator.identity}:", *metrics, sep="\n")
        operator.stop()
        print(f"log of {operator.identity}:\n{operator.log[-LOG_CHARACTERS:]}")  # shown if the test failed
    crashed = {name: status for name, status in statuses.items() if status not in (None, 0, -signal.SIGKILL)}
    assert not crashed, f"operators that ended without being asked to, with their status: {crashed}"


@pytest.fixture
def start_daemon(server: ApiServer) -> Iterator[StartDaemon]:
    started: list[ScriptedDaemon] = []

    def start(node: str) -> ScriptedDaemon:
        daemon = ScriptedDaemon(server, node)
        daemon.start()
        started.append(daemon)
        return daemon

    yield start
    for daemon in started:
        daemon.stop()
