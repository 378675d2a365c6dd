"""The probe runs in interpreters we do not choose."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rankscope.probe
from rankscope.probe import injection

FOLDER = Path(rankscope.probe.__file__).parent
MODULES = sorted(FOLDER.rglob("*.py"))


def interpreter(name: str) -> str | None:
    """Of pyenv's versions or on the path; a name on the path may be a shim that only complains."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for found in (*sorted(versions.glob(f"*/bin/{name}")), shutil.which(name)):
        if found and subprocess.run([found, "-c", ""], env={}, capture_output=True, check=False).returncode == 0:
            return str(found)
    return None


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_modules_are_python_3_9_and_load_only_the_stdlib(path: Path) -> None:
    tree = ast.parse(path.read_text(), feature_version=(3, 9))
    for node in tree.body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.append(node.module)
        for name in names:
            assert name.split(".")[0] in sys.stdlib_module_names or name.startswith("rankscope.probe"), name


def test_the_ring_and_the_parsing_work_on_python_3_9(tmp_path: Path) -> None:
    python = interpreter("python3.9") or sys.executable
    injection.copy_to(str(tmp_path))
    code = (
        "import os, sys\n"
        "assert 'rankscope.probe.bootstrap' in sys.modules\n"
        "from rankscope.probe import ring, declaration, session, torch_hooks, step, declare\n"
        "step(); declare(params='7B')\n"
        "r = ring.Ring(); r.append(2, 1, {'input_seconds': 0}, 0, 1); r.write_facts({'rank': 1})\n"
        "assert declaration.coordinates('P', 'pp=2,dp=2', 3, 4) == {'pipeline': 1, 'data': 1}\n"
        "print(os.readlink('/proc/self/fd/%d' % r._fd))\n"
    )
    done = subprocess.run(
        [python, "-c", code], env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert (done.stderr, done.stdout) == ("", "/memfd:rankscope-ring (deleted)\n")


@pytest.mark.parametrize("name", ["python2.7", "python3.6", "python3.8", Path(sys.executable).name])
def test_any_python_starts_quietly_and_runs_its_own_sitecustomize(name: str, tmp_path: Path) -> None:
    python = interpreter(name) or sys.executable  # the test still says something about this one
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import os; os.environ['OWN'] = 'ran'")
    code = "import os, sys; print(os.environ['OWN'] + ' ' + sys.modules['sitecustomize'].__file__)"
    path = os.pathsep.join([injection.inject_folder(), str(own)])
    done = subprocess.run(
        [python, "-c", code],
        env={"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.startswith("ran " + str(own))


def test_api_calls_find_the_injected_probe_without_rankscope_installed() -> None:
    code = (
        "import sys, rankscope.probe as p\n"
        "assert 'rankscope.probe.bootstrap' in sys.modules\n"
        "assert not any('site-packages' in f and 'rankscope' in f for f in sys.path)\n"
        "print(sum(type(f).__name__ == 'TorchFinder' for f in sys.meta_path), p.__file__)\n"
    )
    env = {"PYTHONPATH": injection.inject_folder()}
    # The interpreter our virtual environment was made from has no site-packages of ours, like a foreign image.
    python = str(Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}")
    done = subprocess.run([python, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.split() == ["1", str(FOLDER / "__init__.py")]


def test_both_entry_points_start_one_probe_and_disabling_starts_none() -> None:
    code = "import sys; print(sum(type(f).__name__ == 'TorchFinder' for f in sys.meta_path))"
    counts = []
    for value in ("1", "0"):
        env = {"PYTHONPATH": injection.inject_folder(), "RANKSCOPE_PROBE": value}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        counts.append((done.stdout.strip(), done.stderr))
    assert counts == [("1", ""), ("0", "")]


def test_a_broken_probe_package_does_not_stop_the_program(tmp_path: Path) -> None:
    injection.copy_to(str(tmp_path))
    (tmp_path / "rankscope/probe/failure.py").write_text("raise RuntimeError('half\\ncopied')")
    env = {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", "print('ran')"], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "ran\n"
    assert done.stderr == "rankscope: probe disabled: half copied\n"


def test_hooks_are_installed_after_torch_runs_and_in_late_modules(tmp_path: Path) -> None:
    torch = tmp_path / "torch"
    torch.mkdir()
    (torch / "__init__.py").write_text("events = ['torch runs']")
    (torch / "late.py").write_text("import torch; torch.events.append('late runs')")
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, rankscope.probe.torch_hooks as hooking\n"
        "def install(torch):\n"
        "    torch.events.append('install')\n"
        "    return {'torch.late': lambda module: torch.events.append('install late')}\n"
        "hooking.install = install\n"
    )
    code = (
        "import importlib.util; assert importlib.util.find_spec('torch')  # looking is not importing\n"
        "import torch; print(torch.events); import torch.late; print(torch.events[2:])\n"
        "print(type(torch.__loader__).__name__, vars(torch.__loader__).keys() & {'exec_module'}, torch.__spec__.name)\n"
    )
    path = os.pathsep.join([injection.inject_folder(), str(tmp_path)])
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "['torch runs', 'install']",
        "['late runs', 'install late']",
        "SourceFileLoader set() torch",
    ]


def test_torch_imports_through_a_universal_loader_asked_twice(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("runs = True")
    (tmp_path / "other.py").write_text("")
    (tmp_path / "sitecustomize.py").write_text(
        "import rankscope.probe.torch_hooks as hooking\n"
        "def install(torch): torch.is_hooked = True; return {}\n"
        "hooking.install = install\n"
    )
    code = (
        "import sys\n"
        "from importlib import util\n"
        "from importlib.machinery import PathFinder\n"
        "class Loader:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        found = PathFinder.find_spec(name, path)\n"
        "        return found and util.spec_from_file_location(name, found.origin, loader=self)\n"
        "    def create_module(self, spec): return None\n"
        "    def exec_module(self, module): exec(open(module.__file__).read(), vars(module))\n"
        "sys.meta_path.insert(1, Loader())\n"
        "util.find_spec('torch'); util.find_spec('torch')\n"
        "import other, torch\n"
        "print(torch.runs, torch.is_hooked, hasattr(other, 'is_hooked'), vars(torch.__loader__))\n"
    )
    path = os.pathsep.join([injection.inject_folder(), str(FOLDER.parents[1]), str(tmp_path)])
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert (done.stderr, done.stdout) == ("", "True True False {}\n")
