"""Importing this module starts the probe: it puts a finder on sys.meta_path that waits for torch and costs one
dictionary lookup per import until then. Both ways in (rankscope_probe.pth, inject/sitecustomize.py) import it, and a
module is imported once, so the probe never starts twice."""

from __future__ import annotations

import sys
from typing import Any, Callable, Dict

from . import exit_report
from .failure import disable, switch


class TorchFinder:
    """Lets the real finders find torch, and adds a call after its module has been executed. Stays on sys.meta_path:
    taking it off could make an import that is iterating over the list skip another finder."""

    def __init__(self) -> None:
        self._waiting: Dict[str, Callable[[Any], None]] = {"torch": self._torch_is_there}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self._waiting or not switch.on:
            return None
        for finder in list(sys.meta_path):
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            # What another finder raises is the user's to see, as without us.
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                self._call_after_execution(spec.loader)
                return spec
        return None

    def _call_after_execution(self, loader: Any) -> None:
        try:
            # One loader may serve several modules, and a spec may be looked for without being used.
            if loader is None or isinstance(loader, type) or _is_ours(loader.exec_module):
                return
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                # The loader is as it was before anybody can look at it: an attribute on the instance, gone again.
                vars(loader).pop("exec_module", None)
                execute(module)
                self._executed(module.__name__, module)

            loader.exec_module = exec_module
        except Exception as error:
            disable(error)

    def _executed(self, name: str, module: Any) -> None:
        action = self._waiting.pop(name, None)
        if action is None or not switch.on:
            return
        try:
            action(module)
        except Exception as error:
            disable(error)

    def _torch_is_there(self, torch: Any) -> None:
        from . import torch_hooks

        self._waiting.update(torch_hooks.install(torch))

    def start(self) -> None:
        sys.meta_path.insert(0, self)
        if "torch" in sys.modules:
            self._executed("torch", sys.modules["torch"])


def _is_ours(function: Any) -> bool:
    return getattr(function, "__module__", None) == __name__


def _start() -> None:
    try:
        exit_report.install()
        TorchFinder().start()
    except Exception as error:
        disable(error)


_start()
