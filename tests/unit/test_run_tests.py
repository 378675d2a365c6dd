from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tools import run_tests
from tools.run_tests import Suite


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


def test_what_fails_is_run_again_and_keeps_nothing_from_running(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    # The import of the plugin takes half the time of a run of one test.
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest")
    marker, flaky, broken = tmp_path / "was here", tmp_path / "test_flaky.py", tmp_path / "test_broken.py"
    flaky.write_text(
        "from pathlib import Path\n"
        f"def test_second_time():\n    seen = Path({str(marker)!r}).exists()\n    Path({str(marker)!r}).touch()\n"
        "    assert seen\n"
        "def test_each_time():\n    pass\n"
    )
    broken.write_text("def test_one():\n    assert False\n")
    lanes = (
        (python("failing", "exit('reason')"), python("later", "print('ran')")),
        (Suite("flaky", (str(flaky), "-n", "1", "--dist", "loadfile")),),
        (Suite("broken", (str(broken),)),),
        (Suite("absent", (str(tmp_path / "test_absent.py"),)),),
    )
    assert run(monkeypatch, lanes, ((python("last", ""),),)) == 1
    printed = capfd.readouterr()
    assert "reason" in printed.out
    assert outcomes(printed.out) == {
        "failing": ["FAILED"],
        "later": ["passed"],
        "flaky": ["2", "passed", "passed"],
        "broken": ["1", "failed", "FAILED"],
        "absent": ["FAILED"],
        "last": ["passed"],
        "all": ["2", "passed,", "1", "failed", "FAILED"],
    }
    assert sorted(printed.err.removeprefix("failed: ").strip().split(", ")) == ["absent", "broken", "failing"]
    again = dict(line.split(" when run again: ") for line in printed.out.splitlines() if "when run again" in line)
    assert "test_flaky.py::test_second_time" in again["passed"] and "FAILED" in again, again


def test_a_run_in_which_nothing_fails_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, ((python("one", ""),),)) == 0


def test_an_unknown_suite_is_refused_with_the_names(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_tests.main(["acceptance", "earthquake"])
    assert "choose one of demo, endings, frameworks" in capfd.readouterr().err


def test_a_report_that_was_not_finished_counts_nothing(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    assert run_tests.counts_of(report) == {}
    for text in ("", '<?xml version="1.0"?><testsuites><testsuite tests="3"'):
        report.write_text(text)
        assert run_tests.counts_of(report) == {}


def test_progress_counts_the_tests_that_pytest_has_printed(tmp_path: Path) -> None:
    printed = tmp_path / "output"
    with printed.open("w+") as output:
        assert run_tests.outcomes(output.fileno()) == ""
        output.write("bringing up nodes...\n" + "." * 72 + " [  4%]\n..Fs.")
        output.flush()
        assert run_tests.outcomes(output.fileno()) == ", 77 tests, 1 FAILED"


def test_make_test_sets_up_and_runs_each_real_component() -> None:
    assert "make test" in (run_tests.ROOT / ".ci" / "run").read_text().splitlines()
    makefile = (run_tests.ROOT / "Makefile").read_text()
    assert re.search(r"^demo: setup\b", makefile, re.MULTILINE)
    assert re.search(r"^test: setup prometheus\b", makefile, re.MULTILINE)
    suites = [suite for row in run_tests.TEST_ROWS for lane in row for suite in lane]
    paths = {path for suite in suites for path in suite.options}
    # The API server, Prometheus, the browser, and training jobs.
    assert {"tests/kube", "tests/alerts", "tests/console", "tests/e2e"} <= paths
    set_up = {command for suite in suites for command in suite.command}
    assert {f"tools/setup_{name}.sh" for suite in suites for name in suite.needs} <= set_up
