from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

Audited = Callable[[], list[dict[str, Any]]]


def audit_records(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The records of the test so far that would be in the audit log."""
    return [json.loads(record.message) for record in caplog.records if record.name == "rankscope.audit"]
