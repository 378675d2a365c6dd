"""The images, built from the Dockerfile's own instructions without an engine, and run as Kubernetes would run them.

The base image is a stand-in (base_root.py); everything above it is what the Dockerfile copies and installs."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rankscope.operator.webhooks.pod_injection import FOLDER, init_container
from tests.images.base_root import find_interpreter, make_base
from tests.images.build_context import read_rules, visible_files
from tests.images.dockerfile_reading import read_stages
from tests.images.image_wheels import fetch_wheels
from tests.images.project_reading import ROOT, version
from tests.images.root_entering import Entry, run_in
from tests.images.stage_building import SYSTEM_PATH, Builder, Image

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="another root takes CAP_SYS_CHROOT: run as root")

DOCKER = ROOT / "deploy" / "docker"
VERSION = version()
# An image takes a minute to build. In `make test` those that run beside a job are built.
OPERATOR_IN_ACCEPTANCE = pytest.param("operator", marks=pytest.mark.acceptance)
STRANGER = "12345:54321"  # a pod's author may choose any user for the init container
# What the chart gives a daemon, and what it mounts where.
DAEMON = Entry(
    read_only=True,
    writable=("/run/rankscope", "/tmp", "/var/lib/rankscope/captures", "/var/lib/rankscope/profiles"),
    capabilities=("sys_ptrace", "dac_read_search", "fowner", "sys_admin"),
)
OPERATOR = Entry(read_only=True, writable=("/tmp",), capabilities=())
IMPORT_ALL = """
import importlib, os, pkgutil, sys
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    for found in pkgutil.walk_packages(getattr(module, "__path__", ()), name + "."):
        importlib.import_module(found.name)
files = [(name, module.__spec__) for name, module in sys.modules.items() if getattr(module, "__spec__", None)]
def compiled(spec):  # by hash and unchecked: valid whatever became of the source's time
    return os.path.exists(spec.cached or "") and open(spec.cached, "rb").read(8)[4] == 1
slow = [name for name, spec in files if (spec.origin or "").endswith(".py") and not compiled(spec)]
print("compiled at every start:", slow)
"""
LIVE = """
import signal, subprocess, sys, time, urllib.request
daemon = subprocess.Popen(["rankscope", "daemon"])
deadline = time.monotonic() + 180
while True:
    try:
        text = urllib.request.urlopen("http://127.0.0.1:9464/metrics", timeout=10).read().decode()
        break
    except OSError:
        assert daemon.poll() is None and time.monotonic() < deadline, "no /metrics"
        time.sleep(0.1)
daemon.send_signal(signal.SIGTERM)
print(daemon.wait(60), [line for line in text.splitlines() if line.startswith("rankscope_build_info")])
"""


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    folder = Path(tempfile.mkdtemp(dir=roomy_memory() or tmp_path_factory.mktemp("images"), prefix="rankscope-images-"))
    try:
        yield builder_in(folder)
    finally:
        subprocess.run(["rm", "-rf", str(folder)], check=True)


def roomy_memory() -> Path | None:
    """Tens of thousands of files, half a gigabyte: a disk takes its time to write them and again to remove them."""
    memory = os.statvfs("/dev/shm")
    roomy = memory.f_bavail * memory.f_frsize > 4 << 30 and not memory.f_flag & os.ST_NOEXEC
    return Path("/dev/shm") if roomy else None


def builder_in(folder: Path) -> Builder:
    context, base = folder / "context", folder / "base"
    for name in visible_files(ROOT, read_rules((ROOT / ".dockerignore").read_text())):
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, context / name)
    interpreter = find_interpreter()
    base.mkdir()
    pip = make_base(base, interpreter)
    wheels = fetch_wheels(interpreter, pip)
    stages = read_stages((DOCKER / "Dockerfile").read_text(), {"BUILDPLATFORM": "linux/here"})
    start = Image(base, {"PATH": SYSTEM_PATH, **interpreter.environment})
    return Builder(stages, context, start, folder, wheels, {"VERSION": VERSION, "REVISION": "0123abc"})


@pytest.fixture(scope="module")
def daemon(builder: Builder) -> Image:
    return builder.image("daemon")


@pytest.fixture(scope="module")
def operator(builder: Builder) -> Image:
    return builder.image("operator")


@pytest.fixture(scope="module")
def probe(builder: Builder) -> Image:
    return builder.image("probe")


def told(image: Image, command: list[str], entry: Entry, user: str = "") -> str:
    entry = replace(entry, user=user or image.user, environment=image.environment, folder=image.folder)
    done = run_in(image.root, command, entry)
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def packages(image: Image) -> set[str]:
    found = image.root.glob("opt/*/lib/python3.*/site-packages/*.dist-info/METADATA")
    names = [re.search(r"^Name: (\S+)", path.read_text(), re.MULTILINE) for path in found]
    return {re.sub(r"[-_.]+", "-", name[1]).lower() for name in names if name}


def locked(name: str) -> set[str]:
    return set(re.findall(r"^([a-z0-9-]+)==", (DOCKER / f"{name}.lock").read_text(), re.MULTILINE))


def test_daemon_runs_on_a_read_only_root_with_chart_capabilities(daemon: Image) -> None:
    assert told(daemon, ["rankscope", "--version"], DAEMON) == f"rankscope {VERSION}\n"
    report = json.loads(told(daemon, ["rankscope", "doctor", "--json"], DAEMON))
    findings = {finding["check"]: finding for finding in report["findings"]}
    assert report["healthy"], findings
    assert findings["py-spy"]["level"] == findings["packages"]["level"] == "ok"
    assert 'capture_dir = "/var/lib/rankscope/captures"' in told(daemon, [*daemon.entrypoint, "--print-config"], DAEMON)


def test_the_daemon_serves_its_version_and_ends_when_told(daemon: Image) -> None:
    assert daemon.entrypoint == ("rankscope", "daemon")
    ended = told(daemon, ["python3", "-c", LIVE], DAEMON)
    assert ended.startswith("0 ["), ended
    assert f'version="{VERSION}"' in ended


def test_the_daemon_has_what_its_lock_names_and_no_more(daemon: Image) -> None:
    assert packages(daemon) == locked("daemon") | {"rankscope"}
    assert not locked("daemon") & {"torch", "kubernetes", "pyarrow", "rich"}
    modules = ["rankscope.daemon", "rankscope.probe", "rankscope.analysis", "rankscope.v1", "rankscope.cli.daemon"]
    assert told(daemon, ["python3", "-c", IMPORT_ALL, *modules], DAEMON).endswith("compiled at every start: []\n")


@pytest.mark.acceptance
def test_the_operator_starts_as_nobody_on_a_read_only_root(operator: Image) -> None:
    assert operator.user == "65532:65532"
    assert operator.entrypoint == ("rankscope", "operator")
    assert told(operator, ["rankscope", "--version"], OPERATOR) == f"rankscope {VERSION}\n"
    assert "--webhook-listen" in told(operator, [*operator.entrypoint, "--help"], OPERATOR)
    entry = replace(OPERATOR, user=operator.user, environment=operator.environment)
    alone = run_in(operator.root, list(operator.entrypoint), entry)
    assert alone.returncode != 0
    assert alone.stderr.startswith("error: "), alone.stderr  # a sentence, no traceback: all of it could be imported


@pytest.mark.acceptance
def test_the_operator_has_its_locked_packages_and_no_process_readers(operator: Image) -> None:
    assert packages(operator) == locked("operator") | {"rankscope"}
    assert not locked("operator") & {"torch", "py-spy", "nvidia-ml-py", "pyarrow", "rich"}
    modules = ["rankscope.operator", "rankscope.cli.operator"]
    assert told(operator, ["python3", "-c", IMPORT_ALL, *modules], OPERATOR).endswith("compiled at every start: []\n")


@pytest.mark.parametrize("name", ["probe", "daemon"])
def test_the_webhook_s_command_fills_the_volume_as_any_user(builder: Builder, name: str, tmp_path: Path) -> None:
    """The daemon's image is on every node already: docs/injection.md lets people name it instead."""
    image, volume = builder.image(name), tmp_path / "volume"
    volume.mkdir()
    volume.chmod(0o777)
    command = init_container({}, {}, "image")["command"]
    told(image, command, Entry(read_only=True, kept={volume: FOLDER}, capabilities=()), STRANGER)
    sources = {path.relative_to(volume).as_posix() for path in volume.rglob("*") if path.is_file()}
    assert {"sitecustomize.py", "rankscope/probe/__init__.py", "rankscope/probe/ring.py"} <= sources
    assert all(source == "sitecustomize.py" or source.startswith("rankscope/probe/") for source in sources)
    assert foreign_imports(volume) <= {"torch"}
    for python in pythons():
        done = subprocess.run(
            [python, "-c", "import rankscope.probe.session, rankscope.probe; print(rankscope.probe.__file__)"],
            env={"PYTHONPATH": str(volume), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=180,
            cwd=tmp_path,
        )
        assert done.stdout.startswith(str(volume)), f"{python}: {done.stdout}{done.stderr}"


def test_the_probe_image_holds_only_the_probe_and_its_metadata(probe: Image) -> None:
    assert (probe.entrypoint, probe.command) == (("python3", "-m", "rankscope.probe.injection"), (FOLDER,))
    ours = probe.root / "opt" / "rankscope-probe"
    assert {path.name for path in ours.iterdir()} == {"rankscope", f"rankscope-{VERSION}.dist-info"}
    assert {path.name for path in (ours / "rankscope").iterdir()} == {"probe"}
    assert foreign_imports(ours) <= {"torch"}


@pytest.mark.parametrize("name", ["daemon", OPERATOR_IN_ACCEPTANCE, "probe"])
def test_our_files_are_neither_writable_by_others_nor_setuid(builder: Builder, name: str) -> None:
    for path in (builder.image(name).root / "opt").rglob("*"):
        mode = path.lstat().st_mode
        assert path.is_symlink() or not mode & 0o6022, path
    assert not list((builder.image(name).root / "root").glob("**/*"))  # pip's cache, a build's rest
    assert not list(builder.image(name).root.glob("*/*/bin/*pip*"))
    assert builder.image(name).labels["org.opencontainers.image.version"] == VERSION


def foreign_imports(folder: Path) -> set[str]:
    found: set[str] = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found.add((node.module or "").split(".")[0])
    return found - set(sys.stdlib_module_names) - {"rankscope"}


def pythons() -> list[str]:
    """Whichever this machine has of those that training images have."""
    names = [shutil.which(f"python3.{minor}") for minor in range(9, 15)]
    works = [name for name in names if name and subprocess.run([name, "-c", ""], capture_output=True).returncode == 0]
    return [sys.executable, *works]
