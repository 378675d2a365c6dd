"""What `make audit` makes of pip-audit's answers: silence is not a clean bill."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import audit_dependencies
from tools.audit_dependencies import Answer, answers
from tools.lock_images import LOCKS

CLEAN = {"name": "numpy", "version": "2", "vulns": []}
BAD = {"name": "numpy", "version": "2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["3"], "aliases": []}]}
SILENT = {"name": "numpy", "skip_reason": "Dependency not found on PyPI and could not be audited: numpy (2)"}


def test_a_skipped_package_has_no_answer() -> None:
    told = answers({"dependencies": [CLEAN, BAD, SILENT]})
    assert told == [Answer("numpy", ()), Answer("numpy", ("PYSEC-1 (fixed in 3)",)), Answer("numpy", None)]


@pytest.mark.parametrize(("vulnerabilities", "status"), [((), 0), (("PYSEC-1 (fixed in 3)",), 1), (None, 2)])
def test_it_ends_well_only_if_every_package_was_asked_about(
    monkeypatch: pytest.MonkeyPatch, vulnerabilities: tuple[str, ...] | None, status: int
) -> None:
    def ask(lock: Path, _service: str) -> list[Answer]:
        first, *others = audit_dependencies.names(lock)
        return [Answer(first, vulnerabilities), *(Answer(name, ()) for name in others)]

    monkeypatch.setattr(audit_dependencies, "ask", ask)
    assert audit_dependencies.main() == status


def test_the_second_service_answers_what_the_first_did_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(lock: Path, service: str) -> list[Answer]:
        return [Answer(name, () if service == "osv" else None) for name in audit_dependencies.names(lock)]

    monkeypatch.setattr(audit_dependencies, "ask", ask)
    assert set(audit_dependencies.audit(LOCKS[1].path).values()) == {()}
