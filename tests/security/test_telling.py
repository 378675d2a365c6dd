"""Last of all, for it has to be waited for: what the log says of the strangers that the other tests sent."""

from __future__ import annotations

import re

from tests.security.attacked import Attacked
from tests.security.test_strangers import refusal
from tests.support.waiting import wait_until


def test_callers_without_certificates_are_counted_in_a_line_per_minute(
    attacked: Attacked,
) -> None:
    with attacked.channel(None) as channel:
        refusal(channel)
    found = r"refused (\d+) connections: they showed no certificate"
    wait_until(lambda: re.search(found, attacked.log), lambda: attacked.log)
    assert len(re.findall(found, attacked.log)) <= 1 + attacked.age_seconds / 60


def test_no_attack_has_forged_a_line_of_the_log(attacked: Attacked) -> None:
    for line in attacked.log.splitlines():
        assert re.match(r"rankscope up: |\d{4}-\d\d-\d\dT|\d\d:\d\d:\d\d ", line), line
        assert not line.startswith("2000-01-01"), line
        assert len(line) < 4096
