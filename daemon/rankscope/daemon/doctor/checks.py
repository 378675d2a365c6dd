"""One function per thing the daemon needs of the machine. Each looks, and says what it means when it is missing."""

from __future__ import annotations

import enum
import fcntl
import importlib.metadata
import importlib.util
import mmap
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from rankscope.common.text import one_line
from rankscope.daemon.config import NONE, Config, parse_address
from rankscope.daemon.server.certificates import SOON_DAYS, CertificateError, check_pair, validity

CAP_SYS_PTRACE = 19
PYTHON_NEEDED = (3, 10)
SAMPLING_SECONDS = 20
PROCESSES_LOOKED_AT = 2000
PACKAGES = ("grpc", "grpc_health", "grpc_reflection", "numpy", "prometheus_client", "google.protobuf")
# Sleeps in a function with a name to look for, and says when it is there.
SAMPLED_PROGRAM = (
    "import sys, time\n"
    "def rankscope_doctor():\n    print('ready', flush=True)\n    time.sleep(60)\n"
    "rankscope_doctor()\n"
)


class Level(enum.Enum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    check: str
    level: Level
    text: str
    next_step: str = ""


def platform_is_known(config: Config) -> Iterator[Finding]:
    text = f"{platform.system()} {platform.release()} on {platform.machine()}"
    if sys.platform != "linux":
        yield Finding("platform", Level.PROBLEM, f"{text}: only Linux has what is needed", "run the daemon on Linux")
    elif platform.machine() not in ("x86_64", "aarch64"):
        yield Finding("platform", Level.WARNING, f"{text}: not tested", "report what works and what does not")
    else:
        yield Finding("platform", Level.OK, text)


def python_is_new_enough(config: Config) -> Iterator[Finding]:
    text = f"Python {platform.python_version()}"
    if sys.version_info[:2] < PYTHON_NEEDED:
        yield Finding("python", Level.PROBLEM, f"{text} is too old for the daemon", "use Python 3.10 or newer")
    else:
        yield Finding("python", Level.OK, text)


def packages_are_installed(config: Config) -> Iterator[Finding]:
    missing = [name for name in PACKAGES if not _is_importable(name)]
    if missing:
        yield Finding("packages", Level.PROBLEM, f"missing: {', '.join(missing)}", "pip install 'rankscope[daemon]'")
    else:
        yield Finding("packages", Level.OK, "grpc, numpy, prometheus-client, protobuf")


def may_read_memory(config: Config) -> Iterator[Finding]:
    """py-spy reads the memory of training processes, which the kernel guards like ptrace."""
    proc = Path(config.proc_root)
    status = (proc / "self/status").read_text()
    capabilities = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:")), 0)
    scope = _read(proc / "sys/kernel/yama/ptrace_scope")
    if scope == "3":
        text = "kernel.yama.ptrace_scope is 3: nobody may read another process, so there are no stacks"
        yield Finding("ptrace", Level.PROBLEM, text, "boot with another kernel.yama.ptrace_scope; 3 cannot be undone")
    elif capabilities >> CAP_SYS_PTRACE & 1:
        yield Finding("ptrace", Level.OK, "CAP_SYS_PTRACE is held: stacks of all users' processes")
    elif scope in (None, "0"):
        text = "no CAP_SYS_PTRACE: stacks and steps of this user's processes only"
        yield Finding("ptrace", Level.WARNING, text, "run the daemon as root or with CAP_SYS_PTRACE to see all users")
    else:
        text = f"no CAP_SYS_PTRACE and kernel.yama.ptrace_scope is {scope}: no stacks of processes started elsewhere"
        yield Finding("ptrace", Level.PROBLEM, text, "run as root or with CAP_SYS_PTRACE, or set ptrace_scope to 0")


def may_read_other_users(config: Config) -> Iterator[Finding]:
    own = os.geteuid()
    seen = refused = 0
    for process in sorted(Path(config.proc_root).glob("[0-9]*"))[:PROCESSES_LOOKED_AT]:
        try:
            if process.stat().st_uid == own:
                continue
            seen += 1
            (process / "environ").read_bytes()
        except PermissionError:
            refused += 1
        except OSError:
            continue
    if refused:
        text = f"{refused} of {seen} processes of other users hide their environment: ranks among them are missed"
        yield Finding("processes", Level.WARNING, text, "run the daemon as root or with CAP_SYS_PTRACE")
    else:
        yield Finding("processes", Level.OK, f"all readable ({seen} of other users)")


def py_spy_samples(config: Config) -> Iterator[Finding]:
    program = _find_py_spy(config.py_spy)
    if program is None:
        where = config.py_spy or "beside this interpreter or on PATH"
        text = f"no py-spy {where}: no stacks, no phases, no hang stacks"
        yield Finding("py-spy", Level.PROBLEM, text, "pip install py-spy, or pass --py-spy")
        return
    version = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=SAMPLING_SECONDS).stdout
    child = subprocess.Popen([sys.executable, "-S", "-c", SAMPLED_PROGRAM], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        command = [program, "dump", "--nonblocking", "--pid", str(child.pid)]
        dump = subprocess.run(command, capture_output=True, text=True, timeout=SAMPLING_SECONDS)
    except subprocess.TimeoutExpired:
        text = f"{program} did not finish within {SAMPLING_SECONDS} s"
        yield Finding("py-spy", Level.PROBLEM, text, "run it by hand: py-spy dump --nonblocking --pid PID")
        return
    finally:
        child.kill()
        child.communicate()
    if "rankscope_doctor" in dump.stdout:
        yield Finding("py-spy", Level.OK, f"{version.strip()} read the stack of a Python {platform.python_version()}")
    else:
        reason = one_line(dump.stderr or dump.stdout, 200)
        text = f"{version.strip()} could not read a child process: {reason}"
        yield Finding("py-spy", Level.PROBLEM, text, "see ptrace above; in a container it needs CAP_SYS_PTRACE")


def memfd_can_be_sealed(config: Config) -> Iterator[Finding]:
    try:
        descriptor = os.memfd_create("rankscope-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        finally:
            os.close(descriptor)
    except (OSError, AttributeError) as error:
        yield Finding("memfd", Level.PROBLEM, f"no sealed memfd: {error}; the probe cannot work", "use a newer Linux")
    else:
        yield Finding("memfd", Level.OK, "sealed memfd: the probe's ring works")


def cgroups_are_readable(config: Config) -> Iterator[Finding]:
    root = Path(config.cgroup_root)
    for version, marker in (("v2", root / "cgroup.controllers"), ("v1", root / "cpu" / "cpu.stat")):
        if marker.exists():
            if os.access(marker, os.R_OK):
                yield Finding("cgroup", Level.OK, f"{version} at {root}")
            else:
                text = f"{version} at {root} cannot be read: throttled ranks are not seen"
                yield Finding("cgroup", Level.WARNING, text, f"let user {os.geteuid()} read {root}")
            return
    text = f"no cgroup at {root}: throttled ranks are not seen"
    yield Finding("cgroup", Level.WARNING, text, "mount the host's /sys/fs/cgroup, or pass --cgroup-root")


def scheduler_counts_delays(config: Config) -> Iterator[Finding]:
    fields = (_read(Path(config.proc_root) / "self/schedstat") or "").split()
    if len(fields) == 3 and fields[0] != "0":
        yield Finding("schedstat", Level.OK, "run delay of threads is counted")
    else:
        text = "the kernel does not count run delay: a starved rank shows in context switches only"
        yield Finding("schedstat", Level.WARNING, text, "use a kernel with CONFIG_SCHED_INFO")


def torch_has_kineto(config: Config) -> Iterator[Finding]:
    """Reads torch's files; importing it would cost seconds and hundreds of megabytes."""
    place = importlib.util.find_spec("torch")
    if place is None or place.origin is None:
        yield Finding("torch", Level.OK, "none in this interpreter; the daemon needs none")
        return
    version = importlib.metadata.version("torch")
    library = Path(place.origin).parent / "lib" / "libtorch_cpu.so"
    if not library.is_file():
        yield Finding(
            "torch", Level.WARNING, f"{version}, without {library.name}: no captures", "install another torch"
        )
        return
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        has_daemon_mode = content.find(b"KINETO_USE_DAEMON") >= 0
    if has_daemon_mode:
        yield Finding("torch", Level.OK, f"{version}; libkineto can be asked for captures (KINETO_USE_DAEMON=1)")
    else:
        text = f"{version}: its libkineto has no daemon mode, so there are no captures"
        yield Finding("torch", Level.WARNING, text, "use torch 2.4 or newer built with kineto")


def addresses_are_free(config: Config) -> Iterator[Finding]:
    address = parse_address(config.metrics_listen, "metrics_listen")
    if address is not None:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
                yield Finding("metrics", Level.OK, f"{config.metrics_listen} is free")
            except OSError as error:
                text = f"{config.metrics_listen}: {error.strerror}; perhaps a rankscope daemon runs already"
                yield Finding("metrics", Level.WARNING, text, "stop it, or pass --metrics-listen 127.0.0.1:0")
    if config.socket != NONE:
        yield _socket_finding(Path(config.socket))


def _socket_finding(path: Path) -> Finding:
    lock = path.with_name(path.name + ".lock")
    if lock.exists():
        try:
            with lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = f"{path} belongs to a running daemon (pid {_read(lock) or 'unknown'})"
            return Finding("socket", Level.WARNING, text, "stop it before starting another, or pass --socket")
        except OSError as error:
            return Finding("socket", Level.WARNING, f"{lock}: {error.strerror}", "pass another --socket")
    existing = next((parent for parent in path.parents if parent.exists()), Path("/"))
    if not os.access(existing, os.W_OK | os.X_OK):
        return Finding("socket", Level.PROBLEM, f"{path}: {existing} is not writable", "pass another --socket")
    return Finding("socket", Level.OK, f"{path} is free")


def _find_py_spy(configured: str) -> str | None:
    if configured:
        return shutil.which(configured)
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")


def _is_importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


# Whether the daemon's certificates can be used, and for how long.

OTHERS_READ = 0o004


def certificates_are_good(config: Config) -> Iterator[Finding]:
    if config.tls_certificate == NONE:
        return
    certificate, key = Path(config.tls_certificate), Path(config.tls_key)
    try:
        findings = [_finding(certificate), _finding(Path(config.tls_client_authority))]
        key.read_bytes()
        check_pair(certificate, key)
        if key.stat().st_mode & OTHERS_READ:
            findings.append(Finding("tls", Level.WARNING, f"{key} can be read by everybody", f"chmod 600 {key}"))
    except CertificateError as error:
        yield Finding("tls", Level.PROBLEM, str(error), "name a certificate and its own key, both PEM, no password")
    except OSError as error:
        text = f"{error.filename} cannot be read: {error.strerror}"
        yield Finding("tls", Level.PROBLEM, text, f"mend the file, or let user {os.geteuid()} read it")
    else:
        yield from findings


def _finding(path: Path) -> Finding:
    now = datetime.now(timezone.utc)
    held = validity(path.read_bytes())
    days = held.days_left(now)
    if held.begin > now:
        text = f"{path} is not valid before {held.begin:%Y-%m-%d %H:%M} UTC"
        return Finding("tls", Level.PROBLEM, text, "check this machine's clock")
    if days < 0:
        text = f"{path} expired at {held.end:%Y-%m-%d %H:%M} UTC: no operator can connect"
        return Finding("tls", Level.PROBLEM, text, "replace the file; the daemon reads it anew by itself")
    if days < SOON_DAYS:
        text = f"{path} expires in {days:.1f} days"
        return Finding("tls", Level.WARNING, text, "replace the file; the daemon reads it anew by itself")
    return Finding("tls", Level.OK, f"{path} is good for {days:.0f} days")
