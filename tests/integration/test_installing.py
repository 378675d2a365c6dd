"""From the source archive to a working command in an empty environment, with the checkout nowhere on its path."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

from tests.images.project_reading import ROOT, version
from tests.integration.small_job import SCRIPT
from tests.support.waiting import wait_until
from tests.unit.test_extras import installed as with_requirements

LIMIT_SECONDS = 280
# What may lie in a checkout and must not leave it.
JUNK = ("__pycache__", ".git/", ".venv", "dist/", ".env", ".key", ".pem", "gpu-wheels", "tests/", ".egg-info")


def clean_environment(home: Path, activated: Path | None = None) -> dict[str, str]:
    """Without this environment's variables: no PYTHONPATH, no activated environment but the given, no RANKSCOPE_*."""
    path = "/usr/bin:/bin:/usr/sbin:/sbin"
    return {"PATH": f"{activated}:{path}" if activated else path, "HOME": str(home)}


def run(command: list[str], folder: Path, statuses: tuple[int, ...] = (0,), activated: Path | None = None) -> str:
    environment = clean_environment(folder, activated)
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


@pytest.fixture
def training(tmp_path: Path) -> Path:
    """The folder of the commands of another environment, which has nothing of ours."""
    run([sys.executable, "-m", "venv", "--without-pip", "training"], tmp_path)
    return tmp_path / "training" / "bin"


def test_a_command_of_another_environment_gets_only_the_probe(installed: Path, training: Path, tmp_path: Path) -> None:
    """`rankscope` may need packages that a training environment must not have, so it has an environment of its own."""
    job = tmp_path / "job.py"
    job.write_text(
        "import importlib.util, json, sys\n"
        "ours = sorted(name for name in sys.modules if name.startswith('rankscope.'))\n"
        "found = [name for name in ('google', 'grpc', 'numpy', 'rich') if importlib.util.find_spec(name)]\n"
        "print(json.dumps([sys.prefix, ours, found]))\n"
    )
    printed = run([str(installed / "rankscope"), "run", "--", "python", str(job)], tmp_path, activated=training)
    prefix, ours, found = json.loads(printed)
    assert prefix == str(training.parent)
    assert "rankscope.probe.bootstrap" in ours and all(name.startswith("rankscope.probe") for name in ours), ours
    assert found == []


@pytest.mark.acceptance
def test_a_job_beside_an_old_protobuf_gets_its_verdict(installed: Path, training: Path, tmp_path: Path) -> None:
    made = subprocess.run([ROOT / "tools" / "setup_old_protobuf.sh"], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    (packages,) = training.parent.glob("lib/python3.*/site-packages")
    for name in with_requirements({"torch"}):
        for top in {Path(file).parts[0] for file in importlib.metadata.files(name) or ()} - {"..", "__pycache__"}:
            (packages / top).symlink_to(Path(sysconfig.get_path("purelib")) / top)
    (packages / "old_protobuf.pth").write_text(f"{ROOT / '.old-protobuf'}\n")
    job = tmp_path / "job.py"
    job.write_text(
        SCRIPT.read_text() + "    import google.protobuf\n\n    print('protobuf', google.protobuf.__version__)\n"
    )
    end, told = tmp_path / "STOP", tmp_path / "told"
    torchrun = ["python", "-m", "torch.distributed.run", "--nproc-per-node", "2", str(job)]
    with told.open("w") as stderr:
        running = subprocess.Popen(
            [str(installed / "rankscope"), "run", "--", *torchrun],
            cwd=tmp_path,
            env=clean_environment(tmp_path, training) | {"JOB_FOLDER": str(tmp_path), "SLOW_RANK": "1"},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    try:
        wait_until(lambda: "rank 1 is slow because of job.py:" in told.read_text(), told.read_text)
        end.touch()
        printed, _ = running.communicate(timeout=LIMIT_SECONDS)
    finally:
        end.touch()  # the job outlives what is killed here
        running.kill()
        running.wait()
    assert running.returncode == 0, told.read_text()
    assert printed.splitlines() == ["trained", "protobuf 3.20.3", "protobuf 3.20.3"]


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
