"""Whether this machine lets us play kubelet: namespaces, mounts and control groups of our own."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path


@functools.cache
def missing_for_nodes() -> str | None:
    """Why nodes and pods cannot be made here; None where they can."""
    if os.geteuid() != 0:
        return "namespaces need root: run as root"
    enter = ["unshare", "--mount", "--pid", "--net", "--fork", "--mount-proc", "mount", "-t", "tmpfs", "none", "/mnt"]
    tried = subprocess.run(enter, capture_output=True, text=True)
    if tried.returncode:
        return f"no namespaces here: {tried.stderr.strip()[:200]}"
    root = Path("/sys/fs/cgroup")
    group = (root if (root / "cgroup.procs").exists() else root / "pids") / f"rankscope-try-{os.getpid()}"
    try:
        group.mkdir()
        group.rmdir()
    except OSError as error:
        return f"no control groups of our own here: {error}"
    return None
