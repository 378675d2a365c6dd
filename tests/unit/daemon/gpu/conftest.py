from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.daemon.gpu.stubbed_source import Stubbed, make_source
from tools.nvml_stub import VARIABLE, Script, build_stub


@pytest.fixture(scope="session")
def stub_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_stub(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    script = Script(tmp_path / "nvml_script")
    monkeypatch.setenv(VARIABLE, str(script.path))
    return script


@pytest.fixture
def stubbed(stub_library: Path, script: Script) -> Iterator[Callable[..., Stubbed]]:
    """Starts a source on the script; what it hangs in is let go at the end."""
    # Loaded by its path, it is what `libnvidia-ml.so.1` means from now on in this process.
    library = ctypes.CDLL(str(stub_library))
    library.stub_reset()
    started: list[Stubbed] = []

    def start(**settings: object) -> Stubbed:
        source = make_source(**settings)
        source.start()
        started.append(Stubbed(source, script, library))
        return started[-1]

    yield start
    script.clear()
    for stubbed in started:
        stubbed.source.close()
