"""The files for machines without Kubernetes: units, settings and Slurm's prolog."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from rankscope.daemon.config import resolve

ROOT = Path(__file__).resolve().parents[3]
SYSTEMD = ROOT / "deploy" / "systemd"
UNITS = sorted(SYSTEMD.glob("*.service"))
PROLOG = ROOT / "deploy" / "slurm" / "task_prolog.sh"


def settings(unit: Path) -> dict[str, str]:
    joined = unit.read_text().replace("\\\n", " ")
    return dict(re.findall(r"^(\w+)=(.*)$", joined, re.MULTILINE))


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_starts_a_command_with_flags_that_exist(unit: Path) -> None:
    program, subcommand, *words = shlex.split(settings(unit)["ExecStart"])
    assert program == "/opt/rankscope/bin/rankscope"
    parser = argparse.ArgumentParser(exit_on_error=False)
    importlib.import_module(f"rankscope.cli.{subcommand}").add_arguments(parser)
    parser.parse_args(words)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_accepts_a_unit(tmp_path: Path, unit: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("a container has no systemd-analyze; the other tests of units do not need it")
    copy = tmp_path / unit.name
    copy.write_text(
        unit.read_text().replace("/opt/rankscope/bin/rankscope", "/bin/true").replace("=rankscope\n", "=root\n")
    )
    done = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=180)
    complaints = [line for line in done.stderr.splitlines() if unit.name in line]
    assert complaints == []


def test_the_daemon_has_the_capabilities_that_the_chart_gives_it() -> None:
    chart = (ROOT / "deploy/helm/rankscope/templates/daemon/daemonset.yaml").read_text()
    added = re.findall(r"^ +- ([A-Z_]+)$", chart[chart.index("drop: [ALL]") :], re.MULTILINE)
    unit = settings(SYSTEMD / "rankscoped.service")
    assert set(unit["CapabilityBoundingSet"].split()) == {f"CAP_{name}" for name in added}
    # These would hide the processes that it reads.
    assert not unit.keys() & {"ProtectProc", "ProcSubset", "PrivateUsers", "PrivateDevices", "User", "DynamicUser"}


def test_the_daemons_settings_are_settings() -> None:
    config = resolve({}, {}, SYSTEMD / "daemon.toml").config
    assert (config.grpc_listen, config.tls_key) == ("0.0.0.0:9465", "/etc/rankscope/tls/tls.key")


def exported(probe: Path, **environment: str) -> dict[str, str]:
    script = PROLOG.read_text().replace("/opt/rankscope-probe", str(probe))
    done = subprocess.run(["sh", "-eu", "-c", script], capture_output=True, text=True, env=environment, check=True)
    assert done.stderr == ""
    return dict(line.removeprefix("export ").split("=", 1) for line in done.stdout.splitlines())


def test_the_prolog_enables_the_probe_and_keeps_job_settings(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").touch()
    assert exported(tmp_path) == {"PYTHONPATH": str(tmp_path), "TEARDOWN_CUPTI": "1"}
    assert exported(tmp_path, PYTHONPATH="/a:/b", TEARDOWN_CUPTI="0") == {"PYTHONPATH": f"{tmp_path}:/a:/b"}
    assert exported(tmp_path, PYTHONPATH=f"/a:{tmp_path}") == {"TEARDOWN_CUPTI": "1"}


def test_the_prolog_does_nothing_when_unwanted_or_without_probe(tmp_path: Path) -> None:
    assert exported(tmp_path) == {}
    (tmp_path / "sitecustomize.py").touch()
    assert exported(tmp_path, RANKSCOPE_PROBE="0") == {}


def test_the_prolog_can_be_run() -> None:
    assert os.access(PROLOG, os.X_OK)
