"""A week of 500 runs on 2,000 GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fleet.reported import check, fleet_in_prometheus, report
from tests.support.measuring import Measured
from tools.fleet_week import WEEK


@pytest.mark.acceptance
@pytest.mark.timeout(1800)
def test_a_week_of_a_fleet_is_reported_quickly(tmp_path: Path, measured: Measured) -> None:
    with fleet_in_prometheus(tmp_path, WEEK) as (fleet, prometheus):
        assert len(fleet.runs) == 500
        found = report(prometheus.url, "--since", "7d", "--json")
        status = Path(f"/proc/{prometheus.process.pid}/status").read_text()
        server_kilobytes = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
    assert found.status == 0, found.errors
    check(fleet, found.document)
    measured("report on a week of 500 runs on 2,000 GPUs", found.seconds, "s", at_most=30.0)
    measured("memory of that report", found.megabytes, "MB", at_most=500.0)
    measured("memory of Prometheus after that report", server_kilobytes / 1024, "MB", at_most=4096.0)
