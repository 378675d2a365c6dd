"""One version: pyproject.toml's. Files that repeat it are compared with it."""

from __future__ import annotations

import re
from importlib.metadata import version as installed_version

import pytest
import yaml

from rankscope.cli.main import main
from tests.images.project_reading import ROOT, version


def test_the_command_tells_the_installed_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"rankscope {installed_version('rankscope')}\n"


def test_the_chart_has_the_package_s_version_and_deploys_it() -> None:
    chart = yaml.safe_load((ROOT / "deploy" / "helm" / "rankscope" / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (version(), version())


def test_the_changelog_begins_with_what_comes_and_then_this_version() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[:2] == ["Unreleased", version()]
    assert len(headings) == len(set(headings))
