"""A job that is captured and hands over a file that its own user may not read: the daemon, as root, could."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from rankscope.daemon.captures.fetch import take_file
from rankscope.daemon.captures.kineto.backend import KinetoBackend
from rankscope.daemon.captures.kineto.config import LEAD_SECONDS, written_file
from rankscope.daemon.captures.orders import CaptureError, Order, Workspace
from rankscope.daemon.procfs import read_stat
from rankscope.daemon.samples import RankProcess
from tests.integration.kineto_peers import Peer, endpoint_for
from tests.security.tenants import NOBODY, tenant, within
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a daemon that reads all users' files runs as root")

SECRET = '{"password": "of root"}'
TRACE = '{"traceEvents": []}'


@pytest.fixture
def secret() -> Iterator[Path]:
    """Root's. Others may know where it is, and not read it. Not under /tmp, which the tenant sees another one of."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        path = Path(folder, "secret.json")
        path.touch(mode=0o600)
        path.write_text(SECRET)
        yield path


def captured(peer: Peer, folder: Path, script: str, *words: object) -> Path:
    """A capture by libkineto's protocol. The tenant runs the script where libkineto would write: $0 is the file."""
    rank = RankProcess(
        "j", 0, 0, 1, peer.pid, read_stat(f"/proc/{peer.pid}").start_ticks, (peer.pid,), {"KINETO_USE_DAEMON": "1"}
    )
    with endpoint_for(peer) as endpoint, ThreadPoolExecutor(1) as threads:
        peer.polls()
        start = time.time() + LEAD_SECONDS + 2.0
        order = Order("c-theft", rank, None, 0.1, round(start * 1000), start + 120.0)
        recording = threads.submit(
            KinetoBackend(endpoint).record, order, Workspace(folder), lambda stage: None, threading.Event()
        )
        while not (asked := [text for text in peer.polls() if "ACTIVITIES_LOG_FILE" in text]):
            assert not recording.done(), recording.exception()
        found = re.search(r"ACTIVITIES_LOG_FILE=(\S+)", asked[0])
        assert found is not None, asked
        within(peer, f"set -- '{written_file(found[1], peer.pid)}' \"$@\"; {script}", *words)
        return recording.result(180).path


def test_a_file_mounted_over_the_trace_is_not_copied(secret: Path, tmp_path: Path) -> None:
    (tmp_path / "workspace").mkdir()
    with tenant() as peer:
        with pytest.raises(CaptureError, match=r"another file is mounted at .*rankscope-c-theft"):
            captured(peer, tmp_path / "workspace", 'touch "$1" && mount --bind "$2" "$1"', secret)
        assert not any((tmp_path / "workspace").iterdir())


def test_the_tenants_own_trace_is_copied(tmp_path: Path) -> None:
    with tenant() as peer:
        assert captured(peer, tmp_path, 'printf %s "$2" >"$1"', TRACE).read_text() == TRACE


@contextmanager
def sleeper(script: str, *words: object) -> Iterator[int]:
    """A process of an ordinary user in a mount namespace that root has prepared, as a container runtime does."""
    prepare = f"{script}\necho ready; exec setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups sleep 1000"
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", prepare, "sh", *map(str, words)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        wait_until(lambda: Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(b"sleep"))
        yield process.pid
    finally:
        process.kill()
        process.communicate()


OWN_FILE = f"""
as() {{ setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups "$@"; }}
as sh -c 'umask 077; printf %s "$1" >/mnt/trace.json' sh '{TRACE}'
"""


@pytest.mark.parametrize(
    "volume",
    [
        pytest.param("mount -t tmpfs -o mode=1777 none /mnt", id="emptyDir in memory"),
        pytest.param('mkdir -m 1777 "$1/volume"; mount --bind "$1/volume" /mnt', id="hostPath"),
        pytest.param(
            # The upper layer of an overlay cannot lie on another overlay, which a test's machine may have.
            'mount -t tmpfs none "$1"; mkdir "$1/l" "$1/w"; mkdir -m 1777 "$1/u"; '
            'mount -t overlay -o "lowerdir=$1/l,upperdir=$1/u,workdir=$1/w" none /mnt',
            id="the container's own root",
        ),
    ],
)
def test_what_an_ordinary_user_writes_in_a_container_is_copied(volume: str, tmp_path: Path) -> None:
    (tmp_path / "box").mkdir()
    target = tmp_path / "taken.json"
    with sleeper(volume + OWN_FILE, tmp_path / "box") as pid:
        taken = take_file(pid, "/mnt/trace.json", target, Workspace(tmp_path).reserve)
        assert taken.st_size == len(TRACE)
    assert target.read_text() == TRACE


def test_another_users_file_in_the_tenants_directory_is_not_copied(tmp_path: Path) -> None:
    # The owner of a directory renames what others have put there, and reads none of it.
    moved = f"""
mount -t tmpfs -o uid={NOBODY},mode=755 none /mnt
umask 077; printf %s '{SECRET}' >/mnt/of-root; chown 0:0 /mnt/of-root
setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups mv /mnt/of-root /mnt/trace.json
"""
    with sleeper(moved) as pid, pytest.raises(CaptureError, match="belongs to uid 0 and the process runs as uid 65534"):
        take_file(pid, "/mnt/trace.json", tmp_path / "taken.json", Workspace(tmp_path).reserve)
    assert not (tmp_path / "taken.json").exists()
