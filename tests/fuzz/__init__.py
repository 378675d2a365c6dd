"""Fuzzing what reads a container's bytes: one `target_<name>.py` for each parser, and a small coverage-guided engine.

See docs/fuzzing.md."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType


def _stand_in_for_kubernetes() -> None:
    """The readers of objects share a module with the client of the API server, which they do not call: where the
    packages of that are missing, empty ones are as good. Here, because this is imported before any target."""
    for name, parts in (("kubernetes", ("client", "config")), ("urllib3", ())):
        if name in sys.modules or importlib.util.find_spec(name) is not None:
            continue
        package = sys.modules[name] = ModuleType(name)
        for part in parts:
            setattr(package, part, ModuleType(f"{name}.{part}"))


_stand_in_for_kubernetes()
