"""Whether a capture may leave a process slower.

CUPTI stays attached after a capture and costs a launch-bound job 19–31 % for the rest of its life, unless the
process was started with TEARDOWN_CUPTI=1."""

from __future__ import annotations

from pathlib import Path

from rankscope.daemon import procfs
from rankscope.daemon.captures.orders import Options
from rankscope.daemon.samples import RankProcess

# An open device file means a CUDA context, now or soon.
_DEVICES = ("/dev/nvidia", "/dev/dxg")
_DESCRIPTORS_LIMIT = 4096


def uses_cuda(pid: int, proc_root: Path = Path("/proc")) -> bool:
    """Doubtful cases count as yes: the harm is permanent."""
    try:
        return procfs.BLOCKING.call(f"{proc_root}/{pid}", lambda: _has_device(pid, proc_root))
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _has_device(pid: int, proc_root: Path) -> bool:
    for number, descriptor in enumerate((proc_root / str(pid) / "fd").iterdir()):
        if number >= _DESCRIPTORS_LIMIT:
            return True
        try:
            if str(descriptor.readlink()).startswith(_DEVICES):
                return True
        except OSError:
            continue
    return False


def slowdown_objection(rank: RankProcess, options: Options, proc_root: Path = Path("/proc")) -> str | None:
    if options.allow_slowdown or rank.environment.get("TEARDOWN_CUPTI") == "1" or not uses_cuda(rank.pid, proc_root):
        return None
    return (
        f"rank {rank.rank} (pid {rank.pid}) uses CUDA and was started without TEARDOWN_CUPTI=1: a capture could leave "
        "it up to 30 % slower for good; start the job with TEARDOWN_CUPTI=1, or accept that with --allow-slowdown"
    )
