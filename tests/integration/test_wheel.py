"""The wheel as pip installs it: what is in it, and that its .pth turns the probe on."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD_SECONDS = 240
PARTS = ("analysis", "cli", "common", "daemon", "operator", "probe", "v1", "kubelet", "pprof")

# The folder holds the unpacked wheel and nothing else: -S keeps the checkout's own .pth files out, so that what is
# imported as rankscope can only have come from the wheel.
TRAIN = """
import os, site, sys
wheel, packages = sys.argv[1:]
site.addsitedir(wheel)
sys.path.append(packages)
import torch
def rings():
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    ours = [link for link in links if os.path.islink(link) and "/memfd:rankscope-ring" in os.readlink(link)]
    return len({os.stat(link).st_ino for link in ours})  # mmap keeps a descriptor of its own
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
probe = sys.modules.get("rankscope.probe")
print(rings(), probe.__file__ if probe else None)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # Without build isolation: hatchling is one of the test packages, and a test needs no index.
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-cache-dir", "--quiet"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(folder), str(ROOT)], capture_output=True, text=True, timeout=BUILD_SECONDS
    )
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("rankscope-*.whl")
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        return archive.namelist()


def test_it_holds_every_part_and_the_pth_at_its_root(names: list[str]) -> None:
    assert "rankscope_probe.pth" in names
    for part in PARTS[:-3]:
        assert f"rankscope/{part}/__init__.py" in names
    for generated in ("v1/window_pb2.py", "kubelet/pod_resources_pb2.py", "pprof/profile_pb2.py"):
        assert f"rankscope/{generated}" in names
    # What is not imported but needed: the injected sitecustomize, the demo's training scripts, the flame graph.
    assert "rankscope/probe/inject/sitecustomize.py" in names
    assert "rankscope/cli/demo_job/train.py" in names
    for suffix in ("js", "css"):
        assert f"rankscope/analysis/profiles/flame_graph.{suffix}" in names
    assert "rankscope/operator/console/static/index.html" in names
    for name in ("alerts.yaml", "recording.yaml", "alertmanager.example.yaml"):
        assert f"rankscope/cli/rules/{name}" in names
    # Every module of the checkout, so that a new one is not forgotten.
    for root in ("proto", "analysis", "daemon", "operator", "cli"):
        modules = (ROOT / root).rglob("rankscope/**/*.py")
        missing = {path.relative_to(ROOT / root).as_posix() for path in modules} - set(names)
        assert not missing, missing


def test_it_holds_nothing_that_breaks_the_namespace_or_shadows_others(names: list[str]) -> None:
    assert "rankscope/__init__.py" not in names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"rankscope", "rankscope_probe.pth"}
    assert {name.split("/")[1] for name in names if name.startswith("rankscope/")} == set(PARTS)
    assert not [name for name in names if "test" in name.lower() or name.endswith((".pyc", ".pth.bak"))]


def test_its_metadata_requires_nothing_by_default_and_includes_the_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(path).decode()
        assert any(name.endswith("LICENSE") for name in archive.namelist())
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:")]
    assert required
    assert all("extra ==" in line for line in required), required


@pytest.mark.parametrize(("switch", "expected"), [({"RANKSCOPE_PROBE": "1"}, "1"), ({}, "0")])
def test_installed_its_pth_starts_the_probe_only_when_asked(
    wheel: Path, tmp_path: Path, switch: dict[str, str], expected: str
) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    packages = str(Path(torch.origin).parents[1])
    names = [name for name in os.environ if name.startswith("RANKSCOPE_") or name == "PYTHONPATH"]
    environment = {name: value for name, value in os.environ.items() if name not in names} | switch
    done = subprocess.run(
        [sys.executable, "-S", "-c", TRAIN, str(tmp_path), packages],
        env=environment,
        capture_output=True,
        text=True,
        timeout=BUILD_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    rings, where = done.stdout.split()
    assert rings == expected, done.stdout + done.stderr
    if switch:
        assert where == str(tmp_path / "rankscope" / "probe" / "__init__.py")
