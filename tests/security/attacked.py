"""What the attackers here attack: one real `rankscope up` with all its listeners, in a pid namespace of its own with a
rank of somebody else's job."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import grpc

from rankscope.operator.alerts.alertmanager_webhook import make_token
from rankscope.v1.rank_service_pb2 import ListRanksRequest
from rankscope.v1.rank_service_pb2_grpc import RankServiceStub
from tests.certificates import Authority, Pair
from tests.support.processes import children
from tests.support.waiting import wait_until

PATIENCE_SECONDS = 180.0
DAEMON, OPERATOR, METRICS = "rankscope-daemon", "rankscope-operator", "rankscope-metrics"
SECRET = "tenant-b-secret"
SECRET_JOB = SECRET
RANK = f"""
export RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 MASTER_ADDR=10.9.8.7 MASTER_PORT=29500 TORCHELASTIC_RUN_ID={SECRET}
{sys.executable} -c '
import mmap, sys, time
with open(sys.argv[1], "rb") as library:  # a rank is known by the torch it has loaded
    loaded = mmap.mmap(library.fileno(), 0, prot=mmap.PROT_READ)
time.sleep(1e6)' "$1" &
shift
unset RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID
"$@" &
wait
"""
_ANNOUNCED = re.compile(
    r"^rankscope up: metrics \S+:(\d+)/metrics, grpc \S+, grpc \S+:(\d+), console \S+:(\d+)/, alerts \S+:(\d+)/", re.M
)
# Lines written by time, not because of a caller: the number of earlier callers, what the daemon sees, verdicts.
_TIMED = re.compile(r"refused \d+ connections: | rankscope\.daemon\.(loop|sampler): |^\d\d:\d\d:\d\d ")


@dataclass
class Attacked:
    folder: Path

    def __post_init__(self) -> None:
        self.authority = Authority(self.folder / "ca")
        self.other_authority = Authority(self.folder / "other-ca")
        self.operator = self.authority.issue("operator", OPERATOR)
        self.token = make_token(self.folder / "token")
        self.socket = self.folder / "run" / "daemon.sock"
        self.captures = self.folder / "host" / "captures"

    def start(self) -> None:
        own = self.authority.issue("daemon", DAEMON)
        flags = {
            "grpc-listen": "127.0.0.1:0",
            "metrics-listen": "127.0.0.1:0",
            "metrics-tls": "true",
            "tls-certificate": own.certificate,
            "tls-key": own.key,
            "tls-client-authority": self.authority.certificate,
            "socket": self.socket,
            "capture-dir": self.captures,
            "profile-dir": self.folder / "profiles",
            "window-seconds": 0.5,
            "stack-rate-hertz": 0,
            "gpu": "false",
            # The only one that listens where others could reach it: with TLS it may.
            "alerts-listen": "0.0.0.0:0",
            "alerts-token": self.folder / "token",
            "console-listen": "127.0.0.1:0",
        }
        up = [sys.executable, "-m", "rankscope.cli.main", "up"]
        up += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        library = self.folder / "libtorch_cpu.so"
        library.write_bytes(b"torch")
        namespace = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
        self._started_at = time.monotonic()
        with (self.folder / "log").open("wb") as log:
            self._unshared = subprocess.Popen(
                [*namespace, "sh", "-c", RANK, "sh", library, *up], stdout=log, stderr=log
            )
        wait_until(lambda: _ANNOUNCED.search(self.log) or self._unshared.poll() is not None, lambda: self.log)
        announced = _ANNOUNCED.search(self.log)
        assert announced is not None, self.log
        self.metrics_port, self.port, self.console_port, self.alerts_port = map(int, announced.groups())
        (shell,) = children(self._unshared.pid)
        (self.pid,) = (pid for pid in children(shell) if b"rankscope.cli.main" in _command(pid))
        wait_until(lambda: self.honest_jobs() == {SECRET_JOB}, lambda: self.log)

    def stop(self) -> None:
        self._unshared.kill()  # and with it all of its namespace
        self._unshared.wait()

    @property
    def age_seconds(self) -> float:
        return time.monotonic() - self._started_at

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    @property
    def lines(self) -> int:
        """Lines of the log, without those that no call causes."""
        return len([line for line in self.log.splitlines() if not _TIMED.search(line)])

    def wait_for_line(self, text: str) -> None:
        """Until the log has it; a caller may be answered first. It comes once."""
        wait_until(lambda: text in self.log, lambda: f"{text}: not in\n{self.log}")
        assert self.log.count(text) == 1

    @property
    def resident_bytes(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    @property
    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def channel(self, pair: Pair | None) -> grpc.Channel:
        own = (None, None) if pair is None else (pair.key.read_bytes(), pair.certificate.read_bytes())
        credentials = grpc.ssl_channel_credentials(self.authority.certificate.read_bytes(), *own)
        options = [("grpc.ssl_target_name_override", DAEMON), ("grpc.use_local_subchannel_pool", 1)]
        return grpc.secure_channel(f"127.0.0.1:{self.port}", credentials, options)

    def honest_jobs(self) -> set[str]:
        """What an operator hears that connects now."""
        with self.channel(self.operator) as channel:
            answer = RankServiceStub(channel).ListRanks(ListRanksRequest(), timeout=PATIENCE_SECONDS)
        return {rank.identity.job for rank in answer.ranks}

    def wait_until_served(self, seconds: float = PATIENCE_SECONDS) -> None:
        """An operator asks again when it is told that there is too much at once, and so do we."""
        wait_until(self.is_served, lambda: self.log, seconds)

    def is_served(self) -> bool:
        try:
            return self.honest_jobs() == {SECRET_JOB}
        except grpc.RpcError as error:
            assert error.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
            return False

    def check_manners(self, text: str) -> None:
        """What a stranger is told: nothing of the host, nothing of the code, nothing of other tenants."""
        for leak in (str(self.folder), "/site-packages", "Traceback", 'File "', ".py", SECRET, "Exception"):
            assert leak not in text, text


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
