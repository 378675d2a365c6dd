"""From the source archive to a working command in an empty environment, with the checkout nowhere on its path."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

from tests.images.project_reading import ROOT, version

LIMIT_SECONDS = 280
# What may lie in a checkout and must not leave it.
JUNK = ("__pycache__", ".git/", ".venv", "dist/", ".env", ".key", ".pem", "gpu-wheels", "tests/", ".egg-info")


def run(command: list[str], folder: Path, statuses: tuple[int, ...] = (0,)) -> str:
    """Without this environment's variables: no PYTHONPATH, no activated environment, no RANKSCOPE_*."""
    environment = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "HOME": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert done.returncode in statuses, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("rankscope-*.tar.gz")
    return built


@pytest.fixture(scope="module")
def installed(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the commands. The wheel is the source archive's; the extras' packages are borrowed from here: they
    are several hundred megabytes, and which ones are needed is told by the wheel's metadata."""
    folder = tmp_path_factory.mktemp("empty")
    pip = [sys.executable, "-m", "pip"]
    quiet = ["--quiet", "--no-deps", "--no-cache-dir", "--disable-pip-version-check"]
    run([*pip, "wheel", *quiet, "--no-build-isolation", "--wheel-dir", str(folder), str(archive)], folder)
    (wheel,) = folder.glob("rankscope-*.whl")
    run([sys.executable, "-m", "venv", "--without-pip", "env"], folder)
    run([*pip, "--python", "env/bin/python", "install", *quiet, "--no-index", str(wheel)], folder)
    (packages,) = folder.glob("env/lib/python3.*/site-packages")
    # A path in a .pth file goes behind ours, and .pth files in it are not read: this checkout's is one.
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (folder / "env" / "bin" / "py-spy").symlink_to(Path(sys.executable).parent / "py-spy")
    return folder / "env" / "bin"


def test_the_source_archive_holds_the_wheels_sources_and_no_junk(archive: Path) -> None:
    with tarfile.open(archive) as opened:
        names = [name.partition("/")[2] for name in opened.getnames()]
    tracked = run(["git", "-C", str(ROOT), "ls-files"], archive.parent).split() if (ROOT / ".git").exists() else names
    roots = ("proto/rankscope/", "analysis/rankscope/", "daemon/", "operator/rankscope/", "cli/rankscope/")
    assert not {name for name in tracked if name.startswith(roots)} - set(names)
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "rules/alerts.yaml"} <= set(names)
    assert not [name for name in names if any(junk in name for junk in JUNK)]
    assert archive.stat().st_size < 4_000_000


def test_the_command_works_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    where = "import rankscope.cli as cli, rankscope.daemon as daemon; print(cli.__file__, daemon.__file__)"
    files = run([str(installed / "python"), "-c", where], tmp_path).split()
    assert all(file.startswith(str(installed.parent)) for file in files), files
    assert run([str(installed / "rankscope"), "--version"], tmp_path) == f"rankscope {version()}\n"
    # 1 is for what a machine may lack, or another daemon on the port.
    report = json.loads(run([str(installed / "rankscope"), "doctor", "--json"], tmp_path, (0, 1)))
    levels = {finding["check"]: finding["level"] for finding in report["findings"]}
    assert levels["packages"] == levels["py-spy"] == "ok", report
    assert "--webhook-listen" in run([str(installed / "rankscope"), "operator", "--help"], tmp_path)


@pytest.mark.acceptance
def test_the_demo_outside_the_checkout_finds_a_slow_first_rank(installed: Path, tmp_path: Path) -> None:
    fault = "slow-rank:rank=0,delay=60"
    printed = run([str(installed / "rankscope"), "demo", "--world-size", "2", "--fault", fault, "--json"], tmp_path)
    report = json.loads(printed.splitlines()[-1])
    assert report["right"], report
    assert (report["verdict"], report["culprits"], report["cause"]["phase"]) == ("slow_rank", [0], "forward"), report
    assert report["cause"]["frames"][0]["file"].endswith("model.py"), report
    slow, other = sorted(report["ranks"], key=lambda rank: float(rank["wait_seconds"]))
    assert slow["rank"] == 0 and slow["self_seconds"] > other["self_seconds"], report
