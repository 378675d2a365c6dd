"""Where the binaries of Prometheus and Alertmanager are, and the rules that come with Rankscope."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

FOLDER_VARIABLE = "RANKSCOPE_PROMETHEUS_DIR"
_HERE = Path(__file__).resolve().parent.parent
_CHECKOUT = _HERE.parents[2]
# Debian names one of them differently.
_SPELLINGS = {"prometheus": ("prometheus",), "alertmanager": ("alertmanager", "prometheus-alertmanager")}


class StackError(Exception):
    """Prometheus or Alertmanager cannot run: says which, why and what to do."""


@dataclass(frozen=True)
class Binaries:
    prometheus: Path
    alertmanager: Path


def find_binaries() -> Binaries:
    found = {name: _find(name) for name in _SPELLINGS}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        raise StackError(
            f"{' and '.join(missing)}: not in {FOLDER_VARIABLE}, not on the PATH; next: apt-get install "
            f"--no-install-recommends prometheus prometheus-alertmanager, or name a folder in {FOLDER_VARIABLE}"
        )
    return Binaries(**{name: path for name, path in found.items() if path is not None})


def _find(name: str) -> Path | None:
    # What tools/setup_prometheus.sh gets for a checkout comes last: a machine's own are newer or meant.
    folders = (os.environ.get(FOLDER_VARIABLE), os.environ.get("PATH"), str(_CHECKOUT / ".prometheus" / "bin"))
    for folder in filter(None, folders):
        for spelling in _SPELLINGS[name]:
            if found := shutil.which(spelling, path=folder):
                return Path(found).resolve()
    return None


@dataclass(frozen=True)
class Rules:
    files: tuple[Path, ...]
    alertmanager_example: Path


def find_rules() -> Rules:
    """Those in the wheel, or those of the checkout."""
    for folder in (_HERE / "rules", _CHECKOUT / "rules"):
        files = sorted(path for path in folder.glob("*.yaml") if not path.name.endswith(".example.yaml"))
        example = folder / "alertmanager.example.yaml"
        if files and example.is_file():
            return Rules(tuple(files), example)
    raise StackError("the alerting rules are missing from this installation; install Rankscope again")
