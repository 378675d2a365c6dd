"""A week of 500 runs on 2,000 GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.alerts.prometheus_running import Prometheus
from tests.fleet.exported import check_export
from tests.fleet.reported import check, fleet_in_prometheus, ran, report
from tests.support.measuring import Measured
from tools.fleet_week import WEEK, Fleet


@pytest.fixture(scope="module")
def week(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, Prometheus]]:
    with fleet_in_prometheus(tmp_path_factory.mktemp("week"), WEEK) as made:
        yield made


@pytest.mark.acceptance
@pytest.mark.timeout(1800)
def test_a_week_of_a_fleet_is_reported_quickly(week: tuple[Fleet, Prometheus], measured: Measured) -> None:
    fleet, prometheus = week
    assert len(fleet.runs) == 500
    found = report(prometheus.url, "--since", "7d", "--json")
    status = Path(f"/proc/{prometheus.process.pid}/status").read_text()
    server_kilobytes = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
    assert found.status == 0, found.errors
    check(fleet, found.document)
    measured("report on a week of 500 runs on 2,000 GPUs", found.seconds, "s", at_most=30.0)
    measured("memory of that report", found.megabytes, "MB", at_most=500.0)
    measured("memory of Prometheus after that report", server_kilobytes / 1024, "MB", at_most=4096.0)


@pytest.mark.acceptance
@pytest.mark.timeout(1800)
def test_a_week_of_a_fleet_is_exported_in_bounded_memory(
    week: tuple[Fleet, Prometheus], tmp_path: Path, measured: Measured
) -> None:
    fleet, prometheus = week
    # A day more: making the fleet takes minutes, and midnight may be among them.
    found = ran("export", "--prometheus", prometheus.url, "--since", "8d", "-o", str(tmp_path / "week"), "--json")
    assert found.status == 0, found.errors
    assert found.document["complete"] and not found.document["missing"]
    check_export(fleet, prometheus, tmp_path / "week")
    measured("export of a week of 500 runs on 2,000 GPUs", found.seconds, "s", at_most=300.0)
    measured("memory of that export", found.megabytes, "MB", at_most=500.0)
    size = sum(one["bytes"] for one in found.document["tables"].values())
    measured("size of that export", size / 1e6, "MB", at_most=100.0)
