"""What the daemon needs of the machine, one function each: finds whether it is there, what is lost without it and the
next step. Imports none of the daemon's packages, which may be what is missing."""

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
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from rankscope.common.text import one_line
from rankscope.daemon.config import NONE, Config, parse_address
from rankscope.daemon.gpu.dcgm import DcgmError, fetch, parse_readings
from rankscope.daemon.gpu.nvml import NvmlSource
from rankscope.daemon.gpu.readings import GpuSnapshot, GpuSource, GpuState, SourceState
from rankscope.daemon.network.ports import read_ports

CAP_SYS_PTRACE = 19
PYTHON_NEEDED = (3, 10)
SAMPLING_SECONDS = 20
MAX_PROCESSES = 2000
PACKAGES = ("grpc", "grpc_health", "grpc_reflection", "numpy", "prometheus_client", "google.protobuf")
# How long NVML may take to open, and to take the two readings that make the first profile.
OPENING_SECONDS = 20.0
PROFILE_SECONDS = 3.0
DRIVER_FOLDER = Path("/proc/driver/nvidia")
OTHERS_READ = 0o004
FREE_RATIO = 0.05  # of a disk, that profiles leave to others
# Sleeps in a function with a name to look for, and prints a line once it is there.
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
    for process in sorted(Path(config.proc_root).glob("[0-9]*"))[:MAX_PROCESSES]:
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


def gpus_are_readable(
    config: Config, source: Callable[[], GpuSource] = lambda: NvmlSource(0.5), driver_folder: Path = DRIVER_FOLDER
) -> Iterator[Finding]:
    if not config.gpu:
        yield Finding("gpu", Level.OK, "GPU counters are turned off (gpu = false)")
        return
    reading = source()
    reading.start()
    try:
        snapshot = _wait(reading, lambda seen: seen.state is not SourceState.STARTING, OPENING_SECONDS)
        if snapshot.state is SourceState.OK:
            snapshot = _wait(reading, lambda seen: any(gpu.has_profile for gpu in seen.gpus), PROFILE_SECONDS)
    finally:
        reading.close()
    yield _driver_finding(snapshot, driver_folder)


def dcgm_answers(config: Config) -> Iterator[Finding]:
    if config.dcgm_url == NONE:
        return
    try:
        gpus = parse_readings(fetch(config.dcgm_url))
    except DcgmError as error:
        yield Finding("dcgm", Level.PROBLEM, str(error), "start dcgm-exporter on this node, or correct --dcgm-url")
        return
    if not gpus:
        step = "let it export DCGM_FI_* fields with UUID labels"
        yield Finding("dcgm", Level.PROBLEM, f"{config.dcgm_url}: no GPU in it", step)
    elif not any(gpu.has_profile for gpu in gpus):
        text = f"{config.dcgm_url}: {len(gpus)} GPUs, but no profiling figures"
        yield Finding("dcgm", Level.WARNING, text, "add DCGM_FI_PROF_* fields to its counters")
    else:
        yield Finding("dcgm", Level.OK, f"{config.dcgm_url}: {len(gpus)} GPUs with profiling figures")


def _wait(source: GpuSource, enough: Callable[[GpuSnapshot], bool], seconds: float) -> GpuSnapshot:
    give_up_at = time.monotonic() + seconds
    while not enough(snapshot := source.latest()) and time.monotonic() < give_up_at:
        time.sleep(0.05)
    return snapshot


def _driver_finding(snapshot: GpuSnapshot, driver_folder: Path) -> Finding:
    lost = [gpu for gpu in snapshot.gpus if gpu.state is not GpuState.OK]
    if snapshot.state is SourceState.OK and lost:
        text = f"{len(lost)} of {len(snapshot.gpus)} GPUs do not answer: {lost[0].uuid} is {lost[0].state.value}"
        return Finding("gpu", Level.PROBLEM, text, "look for XID errors in dmesg; reset or drain the node")
    if snapshot.state is SourceState.OK:
        names = ", ".join(sorted({gpu.name for gpu in snapshot.gpus}))
        text = f"{len(snapshot.gpus)} × {names}, driver {snapshot.driver_version or 'unknown'}"
        if any(gpu.has_profile for gpu in snapshot.gpus):
            return Finding("gpu", Level.OK, f"{text}, with GPM")
        step = "pass --dcgm-url for profiling figures, if dcgm-exporter runs here"
        return Finding("gpu", Level.WARNING, f"{text}, without GPM: no tensor and SM activity", step)
    if snapshot.state is SourceState.NO_DRIVER and not driver_folder.exists():
        return Finding("gpu", Level.OK, "no NVIDIA driver on this machine: no GPU counters")
    if snapshot.state is SourceState.NO_GPU:
        return Finding("gpu", Level.OK, "the NVIDIA driver has no GPU: no GPU counters")
    state = "does not answer" if snapshot.state is SourceState.STARTING else snapshot.state.value
    text = f"NVML: {state}: {one_line(snapshot.reason, 300)}"
    step = "see that nvidia-smi works where the daemon runs; a container needs the NVIDIA runtime"
    return Finding("gpu", Level.WARNING, text, step)


def network_is_visible(config: Config) -> Iterator[Finding]:
    if not config.network:
        yield Finding("network", Level.OK, "network counters are turned off (network = false)")
        return
    ports = read_ports(Path(config.sys_root))
    if not ports:
        text = f"no network port of the machine in {config.sys_root}: no network counters"
        yield Finding("network", Level.WARNING, text, "in a container, mount the host's /sys and pass --sys-root")
        return
    links = ", ".join(
        f"{sum(port.link == link for port in ports)} {link}" for link in dict.fromkeys(p.link for p in ports)
    )
    down = [f"{port.device} is down" for port in ports if port.is_up is False]
    yield Finding("network", Level.OK, "; ".join([f"ports: {links}", *down[:3]]))


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


def daemon_pid(path: Path) -> int | None:
    """The daemon that has this socket, by its lock."""
    text = _read(_lock_of(path))
    return int(text) if text is not None and text.isdecimal() else None


def _lock_of(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _socket_finding(path: Path) -> Finding:
    lock = _lock_of(path)
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


def profiles_can_be_kept(config: Config) -> Iterator[Finding]:
    if config.profile_dir == NONE:
        yield Finding("profiles", Level.OK, "sampled stacks are not kept (profile_dir = none)")
        return
    folder = Path(config.profile_dir)
    existing = next((place for place in (folder, *folder.parents) if place.exists()), Path("/"))
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        text = f"{folder}: {existing} is no folder that user {os.geteuid()} can write to: no profiles"
        yield Finding("profiles", Level.PROBLEM, text, "pass another --profile-dir")
        return
    if existing == folder and folder.stat().st_uid != os.geteuid():
        yield Finding("profiles", Level.PROBLEM, f"{folder} belongs to another user", "pass another --profile-dir")
        return
    for damaged in folder.glob("*.damaged"):
        text = f"{damaged}: profiles until {datetime.fromtimestamp(damaged.stat().st_ctime):%Y-%m-%d %H:%M} are lost"
        yield Finding("profiles", Level.WARNING, text, "look for errors of the disk in dmesg, then remove the file")
    disk = shutil.disk_usage(existing)
    if disk.free < min(FREE_RATIO * disk.total, config.profile_quota_bytes):
        text = f"{folder}: {disk.free >> 20} MiB are free on its disk: old profiles are removed early"
        yield Finding("profiles", Level.WARNING, text, "make room, or pass another --profile-dir")
    else:
        yield Finding("profiles", Level.OK, f"sampled stacks are kept in {folder}")


def certificates_are_good(config: Config) -> Iterator[Finding]:
    if config.tls_certificate == NONE:
        return
    from rankscope.daemon.server.certificates import CertificateError, check_pair  # needs grpc

    certificate, key = Path(config.tls_certificate), Path(config.tls_key)
    try:
        findings = [_certificate_finding(certificate), _certificate_finding(Path(config.tls_client_authority))]
        key.read_bytes()
        check_pair(certificate, key)
        if key.stat().st_mode & OTHERS_READ:
            findings.append(Finding("tls", Level.WARNING, f"{key} can be read by everybody", f"chmod 600 {key}"))
    except CertificateError as error:
        yield Finding("tls", Level.PROBLEM, str(error), "name a certificate and its own key, both PEM, no password")
    except OSError as error:
        text = f"{error.filename} cannot be read: {error.strerror}"
        yield Finding("tls", Level.PROBLEM, text, f"repair the file, or let user {os.geteuid()} read it")
    else:
        yield from findings


def _certificate_finding(path: Path) -> Finding:
    from rankscope.daemon.server.certificates import SOON_DAYS, validity

    now = datetime.now(timezone.utc)
    held = validity(path.read_bytes())
    days = held.days_left(now)
    if held.begin > now:
        text = f"{path} is not valid before {held.begin:%Y-%m-%d %H:%M} UTC"
        return Finding("tls", Level.PROBLEM, text, "check this machine's clock")
    if days < 0:
        text = f"{path} expired at {held.end:%Y-%m-%d %H:%M} UTC: no operator can connect"
        return Finding("tls", Level.PROBLEM, text, "replace the file; the daemon reads it again by itself")
    if days < SOON_DAYS:
        text = f"{path} expires in {days:.1f} days"
        return Finding("tls", Level.WARNING, text, "replace the file; the daemon reads it again by itself")
    return Finding("tls", Level.OK, f"{path} is good for {days:.0f} days")


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
