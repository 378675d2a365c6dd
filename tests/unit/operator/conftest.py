from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.operator.access.fake_cluster import Cluster


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.server.stop()
