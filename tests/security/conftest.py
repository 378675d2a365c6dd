from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.security.attacked import Attacked
from tests.security.bystander import Bystander, bystander_on_a_node


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "bystander" in getattr(item, "fixturenames", ()):
            item.add_marker("acceptance")


@pytest.fixture(scope="session")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    made = Attacked(tmp_path_factory.mktemp("attacked"))
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="session")
def bystander() -> Iterator[Bystander]:
    with bystander_on_a_node() as made:
        yield made


@pytest.fixture(autouse=True)
def honest_callers_are_served_afterwards(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever was tried: an operator is answered, and neither memory nor descriptors are gone for good."""
    if "attacked" not in request.fixturenames:
        yield
        return
    attacked: Attacked = request.getfixturevalue("attacked")
    before = attacked.resident_bytes
    yield
    attacked.wait_until_served()
    assert attacked.resident_bytes - before < 96 << 20
    assert "Traceback" not in attacked.log
