"""pyproject.toml, which has the one version."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def read_project() -> dict[str, Any]:
    # hatchling, which tests need anyway, brings tomli to the Python that has no tomllib.
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    read: dict[str, Any] = toml.loads((ROOT / "pyproject.toml").read_text())
    return read


def version() -> str:
    return str(read_project()["project"]["version"])
