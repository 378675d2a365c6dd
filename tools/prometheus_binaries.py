"""Where the real Prometheus, promtool, Alertmanager and amtool are; `tools/setup_prometheus.sh` gets them."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_OTHER_NAMES = {"alertmanager": "prometheus-alertmanager"}  # Debian's


@functools.cache
def binary(name: str) -> Path:
    """One of prometheus, promtool, alertmanager, amtool. Looked for in RANKSCOPE_PROMETHEUS_DIR, on the PATH, and in
    this checkout, where it is put if need be."""
    found = _find(name)
    if found is None:
        subprocess.run([str(ROOT / "tools" / "setup_prometheus.sh")], check=True)
        found = _find(name)
    if found is None:
        raise FileNotFoundError(f"{name}: not found after tools/setup_prometheus.sh; next step: run it and read on")
    return found


def _find(name: str) -> Path | None:
    folders = (os.environ.get("RANKSCOPE_PROMETHEUS_DIR"), os.environ.get("PATH"), str(ROOT / ".prometheus" / "bin"))
    for folder in filter(None, folders):
        for spelling in (name, _OTHER_NAMES.get(name, name)):
            found = shutil.which(spelling, path=folder)
            if found is not None:
                return Path(found).resolve()
    return None
