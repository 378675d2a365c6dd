"""Starts the probe in every Python program that has this file's folder on PYTHONPATH, then runs the sitecustomize that
would have run without it. Any Python of the container may get here, down to Python 2: keep the syntax and the
characters old, and start nothing before 3.9. RANKSCOPE_PROBE=0 switches it off."""

import os
import sys


def _import_probe():
    # type: () -> None
    try:
        import rankscope.probe.bootstrap
    except ImportError:
        # Not installed here: use the package this file lies in (rankscope/probe/inject), without putting a foreign
        # site-packages on sys.path.
        import types

        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        if not os.path.isfile(os.path.join(root, "probe", "bootstrap.py")):
            raise
        package = sys.modules.setdefault("rankscope", types.ModuleType("rankscope"))
        path = list(getattr(package, "__path__", ()))
        path.append(root)
        package.__path__ = path
        import rankscope.probe.bootstrap  # noqa: F401 - importing it starts the probe


def _start_probe():
    # type: () -> None
    if sys.version_info < (3, 9) or os.environ.get("RANKSCOPE_PROBE", "1").lower() in ("0", "off", "false", "no"):
        return
    try:
        _import_probe()
    except Exception as error:
        sys.stderr.write("rankscope: probe disabled: %s\n" % " ".join(str(error).split()))


def _run_the_next_sitecustomize():
    # type: () -> None
    # What it raises is reported by `site`, as it would be without us.
    here = os.path.dirname(os.path.realpath(__file__))
    path = [entry for entry in sys.path if os.path.realpath(entry or os.getcwd()) != here]
    if sys.version_info < (3, 5):
        import imp

        try:
            found = imp.find_module("sitecustomize", path)
        except ImportError:
            return
        imp.load_module("sitecustomize", *found)
        return
    import importlib.machinery
    import importlib.util

    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


_start_probe()
_run_the_next_sitecustomize()
