"""Runs a command with a folder as its root: its own mounts, processes and network, as a container engine would."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

LIMIT_SECONDS = 240
# What a base image would have and a copy would take too long for: the machine's own, read-only.
BORROWED = tuple(name for name in ("/etc", "/usr/bin", "/usr/lib", "/usr/lib64", "/usr/sbin") if Path(name).is_dir())
# SIOCSIFFLAGS with IFF_UP: a minimal Debian has no `ip`.
LOOPBACK_UP = """
import fcntl, socket, struct
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh22x", b"lo", 1))
"""
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")


@dataclass(frozen=True)
class Entry:
    """`writable` are empty folders in memory, as an emptyDir is; everything else stays as the root has it."""

    user: str = "0:0"
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: str = "/"
    read_only: bool = False
    writable: Sequence[str] = ()
    shown: Mapping[Path, str] = field(default_factory=dict)  # folders of this machine, and where they can be read
    kept: Mapping[Path, str] = field(default_factory=dict)  # the same, and written to
    capabilities: Sequence[str] | None = None  # what remains to be had; None is all


def run_in(root: Path, command: Sequence[str], entry: Entry) -> subprocess.CompletedProcess[str]:
    apart = ["unshare", "--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--kill-child"]
    return subprocess.run(
        [*apart, "sh", "-ec", script(root, command, entry)],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        stdin=subprocess.DEVNULL,
    )


def script(root: Path, command: Sequence[str], entry: Entry) -> str:
    at = shlex.quote(str(root))
    lines = ["mount --make-rprivate /", f"mount --bind {at} {at}"]
    for target in (*entry.writable, *entry.shown.values(), *entry.kept.values(), *BORROWED):
        lines.append(f"mkdir -p {at}{shlex.quote(target)}")
    if Path("/lib64").exists() and not Path("/lib64").is_symlink():
        lines += [f"mkdir -p {at}/lib64", f"mount --bind /lib64 {at}/lib64"]
    if entry.read_only:
        lines.append(f"mount -o remount,bind,ro {at}")
    shown = {**{Path(name): name for name in BORROWED}, **entry.shown}
    for source, target in shown.items():
        place = at + shlex.quote(target)
        lines += [f"mount --bind {shlex.quote(str(source))} {place}", f"mount -o remount,bind,ro {place}"]
    for source, target in entry.kept.items():
        lines.append(f"mount --bind {shlex.quote(str(source))} {at}{shlex.quote(target)}")
    lines.append(f"mount -t proc proc {at}/proc")
    lines.append(f"mount --rbind /sys {at}/sys")
    lines.append(f"mount -t tmpfs -o mode=755 tmpfs {at}/dev")
    lines.append(f"mkdir -m 1777 {at}/dev/shm")
    for device in DEVICES:
        lines += [f"touch {at}{device}", f"mount --bind {device} {at}{device}"]
    lines += [f"mount -t tmpfs -o mode=1777 tmpfs {at}{shlex.quote(folder)}" for folder in entry.writable]
    lines.append(shlex.join([sys.executable, "-S", "-c", LOOPBACK_UP]))
    values = [f"{name}={value}" for name, value in entry.environment.items()]
    inside = ["sh", "-c", 'cd "$0" && exec "$@"', entry.folder, *command]
    user, _, group = entry.user.partition(":")
    limits = ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", "--no-new-privs"]
    if entry.capabilities is not None:
        kept = ",".join(["-all", *(f"+{name}" for name in entry.capabilities)])
        limits += [f"--bounding-set={kept}", f"--inh-caps={kept}"]
    words = ["env", "-i", *values, *limits, *inside]
    lines.append(f"exec chroot {at} {shlex.join(words)}")
    return "\n".join(lines)
