"""One real API server, and every combination of values rendered once by the real helm."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.kube.api_server import ApiServer
from tests.ship import foreign_kinds
from tests.ship.combinations import COMBINATIONS
from tests.ship.helm import NAMESPACE, Document, Helm

# What the API server of the tests is, and the newest that manifests can be checked for.
OLD, NEW = "1.20.2", "1.37.0"
# Rendered for NEW as well: with everything that differs between the two.
RENDERED_TWICE = ("default", "everything")


@dataclass(frozen=True)
class Rendered:
    """What an install would apply with some values; one object of each kind and name."""

    documents: list[Document]

    def one(self, kind: str, name: str) -> Document:
        return next(each for each in self.documents if each["kind"] == kind and each["metadata"]["name"] == name)

    def all(self, kind: str) -> list[Document]:
        return [each for each in self.documents if each["kind"] == kind]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """Its Services have addresses of the loopback network, so that tests can serve them."""
    made = ApiServer(tmp_path_factory.mktemp("kube"), services=f"127.{random.randint(64, 250)}.0.0/24")
    made.start()
    try:
        made.admin.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        foreign_kinds.install(made)
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Without a cluster."""
    return Helm(tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="session")
def all_rendered(helm: Helm) -> dict[tuple[str, str], Rendered]:
    """By name and version of Kubernetes."""

    found = {}
    for version, names in ((OLD, tuple(COMBINATIONS)), (NEW, RENDERED_TWICE)):
        made = helm.template_all({name: COMBINATIONS[name] for name in names}, "--kube-version", version)
        found |= {(name, version): Rendered(documents) for name, documents in made.items()}
    return found


@pytest.fixture(scope="session")
def rendered(all_rendered: dict[tuple[str, str], Rendered]) -> dict[str, Rendered]:
    return {name: found for (name, version), found in all_rendered.items() if version == OLD}
