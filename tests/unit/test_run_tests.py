from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tools import run_tests
from tools.run_tests import Suite

COUNTED = Suite("counted", ("tests/unit/test_version.py",))


def python(name: str, program: str) -> Suite:
    return Suite(name, command=(sys.executable, "-c", program))


def outcomes(printed: str) -> dict[str, list[str]]:
    table = printed[printed.index("\nsuite ") :].splitlines()
    return {line.split()[0]: line.split()[1:-1] for line in table[2:] if line[-3:-2] == ":"}


@pytest.fixture(autouse=True)
def reports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run_tests, "REPORTS", tmp_path / "reports")


def run(monkeypatch: pytest.MonkeyPatch, *rows: Sequence[Sequence[Suite]]) -> int:
    monkeypatch.setattr(run_tests, "TEST_ROWS", rows)
    return run_tests.main(["test"])


def test_what_fails_keeps_nothing_from_running_and_the_table_has_everything(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    failing, later = python("failing", "exit('reason')"), python("later", "print('ran')")
    assert run(monkeypatch, ((failing, later), (COUNTED,)), ((python("last", ""),),)) == 1
    printed = capfd.readouterr()
    assert "reason" in printed.out
    assert outcomes(printed.out) == {
        "failing": ["FAILED"],
        "later": ["passed"],
        "counted": ["3", "passed", "passed"],
        "last": ["passed"],
        "all": ["3", "passed", "FAILED"],
    }
    assert printed.err == "failed: failing\n"


def test_a_test_that_passes_the_second_time_is_listed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    marker = tmp_path / "was here"
    (tmp_path / "test_one.py").write_text(
        "from pathlib import Path\n"
        f"def test_second_time():\n    seen = Path({str(marker)!r}).exists()\n    Path({str(marker)!r}).touch()\n"
        "    assert seen\n"
        "def test_each_time():\n    pass\n"
    )
    suite = Suite("flaky", (str(tmp_path / "test_one.py"), "-n", "2", "--dist", "loadfile"))
    assert run(monkeypatch, ((suite,),)) == 0
    printed = capfd.readouterr().out
    assert outcomes(printed)["flaky"] == ["2", "passed", "passed"]
    assert "passed when run again: " in printed and "test_one.py::test_second_time" in printed


def test_a_test_that_fails_twice_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "test_one.py").write_text("def test_one():\n    assert False\n")
    assert run(monkeypatch, ((Suite("broken", (str(tmp_path / "test_one.py"),)),),)) == 1
    printed = capfd.readouterr().out
    assert outcomes(printed)["broken"] == ["1", "failed", "FAILED"]
    assert "FAILED when run again: " in printed


def test_a_suite_that_cannot_start_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(monkeypatch, ((Suite("absent", (str(tmp_path / "test_absent.py"),)),),)) == 1
    assert "FAILED when run again: absent" in capfd.readouterr().out


def test_an_unknown_suite_is_refused_with_the_names(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_tests.main(["acceptance", "earthquake"])
    assert "choose one of demo, frameworks" in capfd.readouterr().err


def test_a_report_that_was_not_finished_counts_nothing(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    assert run_tests.counts_of(report) == {}
    for text in ("", '<?xml version="1.0"?><testsuites><testsuite tests="3"'):
        report.write_text(text)
        assert run_tests.counts_of(report) == {}
