from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.security.attacked import Attacked


@pytest.fixture(scope="session")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    made = Attacked(tmp_path_factory.mktemp("attacked"))
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture(autouse=True)
def honest_callers_are_served_afterwards(attacked: Attacked) -> Iterator[None]:
    """Whatever was tried: an operator is answered, and neither memory nor descriptors are gone for good."""
    before = attacked.resident_bytes
    yield
    attacked.wait_until_served()
    assert attacked.resident_bytes - before < 96 << 20
    assert "Traceback" not in attacked.log
