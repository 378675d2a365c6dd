from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import run_tests
from tools.run_tests import Step


def python(name: str, program: str) -> Step:
    return Step(name, (sys.executable, "-c", program))


def test_what_fails_keeps_nothing_from_running_and_the_table_has_everything(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    failing, later = python("failing", "exit('reason')"), python("later", "print('ran')")
    counted = run_tests.suite("counted", "tests/unit/test_version.py")
    monkeypatch.setattr(run_tests, "ROWS", (((failing, later), (counted,)), ((python("last", ""),),)))
    assert run_tests.main() == 1
    printed = capfd.readouterr()
    assert "reason" in printed.out
    table = printed.out[printed.out.index("\nsuite ") :].splitlines()
    outcomes = {line.split()[0]: line.split()[1:-1] for line in table[2:]}
    assert outcomes == {
        "failing": ["FAILED"],
        "later": ["passed"],
        "counted": ["3", "passed", "passed"],
        "last": ["passed"],
        "all": ["FAILED"],
    }
    assert printed.err == "failed: failing\n"


def test_a_report_that_was_not_finished_counts_nothing(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    assert run_tests.counts_of(report) == ""
    for text in ("", '<?xml version="1.0"?><testsuites><testsuite tests="3"'):
        report.write_text(text)
        assert run_tests.counts_of(report) == ""


def test_all_is_well_when_nothing_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_tests, "ROWS", (((python("one", ""),),),))
    assert run_tests.main() == 0
