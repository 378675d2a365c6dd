"""A /proc of plain files, for processes that cannot be had for real: other launchers, other namespaces, liars."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

TORCH_MAPS = "7f00-7f01 r-xp 00000000 08:01 1  /opt/venv/site-packages/torch/lib/libtorch_cpu.so\n"
PLAIN_MAPS = "7f00-7f01 r-xp 00000000 08:01 1  /usr/bin/python3.11\n"


class FakeProc:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.root.mkdir()

    def add(
        self,
        pid: int,
        environment: Mapping[str, str] | None = None,
        *,
        parent: int = 1,
        has_torch: bool = True,
        state: str = "S",
        command: str = "python",
        started: int = 100,
        exec_mark: int = 1,
        cpu_ticks: int = 0,
        cgroup: str = "0::/\n",
        namespace_pids: str = "",
        run_delay_nanos: int = 0,
        switches: int = 0,
        uid: int = 0,
        network: int = 0,
    ) -> Path:
        folder = self.root / str(pid)
        (folder / "fd").mkdir(parents=True, exist_ok=True)
        fields = [state, parent, 0, 0, 0, 0, 0, 0, 0, 0, 0, cpu_ticks, 0, 0, 0, 20, 0, 7, 0, started, 1 << 30, 256, 0]
        variables = "".join(f"{name}={value}\0" for name, value in (environment or {}).items())
        (folder / "environ").write_text(variables)
        fields += [exec_mark, 0, exec_mark, *[0] * 22, len(variables), 0]
        (folder / "stat").write_text(f"{pid} ({command}) {' '.join(map(str, fields))}\n")
        (folder / "maps").write_text(PLAIN_MAPS + (TORCH_MAPS if has_torch else ""))
        (folder / "status").write_text(
            f"Name:\tx\nUid:\t{uid}\t0\t0\t0\nNSpid:\t{namespace_pids or pid}\nvoluntary_ctxt_switches:\t{switches}\n"
            f"nonvoluntary_ctxt_switches:\t{2 * switches}\n"
        )
        (folder / "cgroup").write_text(cgroup)
        if network:
            (folder / "ns").mkdir(exist_ok=True)
            (folder / "ns" / "net").unlink(missing_ok=True)
            (folder / "ns" / "net").symlink_to(f"net:[{network}]")
        (folder / "schedstat").write_text(f"5 {run_delay_nanos} 9\n")
        return folder

    def remove(self, pid: int) -> None:
        shutil.rmtree(self.root / str(pid))


def torchrun(rank: int, world_size: int = 4, **more: str) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "run7",
        **more,
    }
