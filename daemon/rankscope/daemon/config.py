"""The daemon's settings: one table, read from flags over environment over file over defaults.

Standard library only: `--help` and configuration errors must work where the daemon's own packages are missing."""

from __future__ import annotations

import importlib
import math
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rankscope.common.http_server import is_loopback

ENVIRONMENT_PREFIX = "RANKSCOPE_DAEMON_"
DEFAULT_FILE = Path("/etc/rankscope/rankscope.toml")
NONE = "none"
METRICS_DETAILS = ("standard", "full")
LOG_LEVELS = ("debug", "info", "warning", "error")

Value = str | float | int | bool


class ConfigError(Exception):
    """A setting is wrong: names where it came from, what it says and what it may be."""


def default_socket() -> str:
    """Where the daemon of this user listens, and where clients look for it."""
    if os.geteuid() == 0:
        return "/run/rankscope/daemon.sock"
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return f"{runtime}/rankscope/daemon.sock" if runtime else f"/tmp/rankscope-{os.geteuid()}/daemon.sock"


def default_capture_dir() -> str:
    """Where captured traces are kept."""
    return f"{_state_dir()}/captures"


def default_profile_dir() -> str:
    """Where sampled stacks are kept."""
    return f"{_state_dir()}/profiles"


def _state_dir() -> str:
    if os.geteuid() == 0:
        return "/var/lib/rankscope"
    return f"{os.environ.get('XDG_STATE_HOME') or Path.home() / '.local' / 'state'}/rankscope"


def _setting(
    default: Value | Callable[[], Value],
    help_text: str,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    begins: str = "",
) -> Any:
    """A field of Config. A callable default depends on the machine. `begins` is the title of a group of settings: this
    one and those after it, up to the next title."""
    made: Callable[[], Value] = default if callable(default) else lambda: default
    metadata = {"default": made, "help": help_text, "low": low, "high": high, "choices": choices, "begins": begins}
    return field(default_factory=made, metadata=metadata)


@dataclass(frozen=True)
class Config:
    """What the daemon runs with. Each field is a setting: flags, variables, checks and documentation derive from it."""

    node: str = _setting(socket.gethostname, "name of this node in windows and metrics", begins="sampling")
    window_seconds: float = _setting(2.0, "length of a window; borders are shared by all nodes", 0.5, 60)
    stack_rate_hertz: float = _setting(10.0, "stack samples per second and rank; 0 turns them off", 0, 100)
    budget_ratio: float = _setting(0.01, "share of one core the daemon may use per rank", 0.0001, 1)
    max_ranks: int = _setting(1024, "how many ranks of this node are watched and exported", 1, 65536)
    socket: str = _setting(
        default_socket, "path of the gRPC Unix socket; none turns it off", begins="addresses and TLS"
    )
    grpc_listen: str = _setting(NONE, "address for gRPC over TCP as well; without TLS loopback only")
    metrics_listen: str = _setting("127.0.0.1:9464", "address of /metrics and /healthz; none turns it off")
    metrics_detail: str = _setting("standard", "which series /metrics has", choices=METRICS_DETAILS)
    metrics_tls: bool = _setting(False, "/metrics by the same certificate, for scrapers that show one")
    tls_certificate: str = _setting(NONE, "the daemon's certificate, for gRPC over TCP; with the next two")
    tls_key: str = _setting(NONE, "its key")
    tls_client_authority: str = _setting(NONE, "who signed the operator's certificate")
    watch_readers: int = _setting(16, "how many clients may watch windows at once", 1, 256)
    captures: bool = _setting(True, "offer deep captures of the ranks of this node", begins="captures")
    capture_dir: str = _setting(default_capture_dir, "where captured traces are kept")
    capture_quota_bytes: int = _setting(10 << 30, "how much captures may take on disk", 1 << 20, 1 << 50)
    capture_quota_seconds: float = _setting(7 * 86400.0, "how long captures are kept", 60, 1e9)
    capture_upload_url: str = _setting(NONE, "where to copy captures to, as in s3://bucket/folder")
    audit_log: str = _setting(NONE, "file for a line of JSON for each capture, when it is requested and when it ends")
    kineto_socket_dir: str = _setting(NONE, "serve libkineto by a socket file in this directory as well")
    duty_cycle_steps: int = _setting(0, "steps to record now and then where no probe runs; 0: never", 0, 100)
    duty_cycle_seconds: float = _setting(600.0, "how often the duty cycle records", 10, 86400)
    duty_cycle_budget_ratio: float = _setting(0.005, "share of a job's time it may cost", 0.0001, 1)
    profile_dir: str = _setting(
        default_profile_dir, "where sampled stacks are kept; none turns that off", begins="profiles"
    )
    profile_interval_seconds: float = _setting(
        60.0, "how often they are written; the unit of time in profiles", 1, 3600
    )
    profile_quota_bytes: int = _setting(1 << 30, "how much profiles may take on disk", 1 << 20, 1 << 50)
    profile_quota_seconds: float = _setting(7 * 86400.0, "how long profiles are kept", 60, 1e9)
    profile_push_url: str = _setting(NONE, "Pyroscope to send profiles to, as in https://pyroscope:4040")
    profile_push_tenant: str = _setting(NONE, "its tenant, the header X-Scope-OrgID")
    profile_push_token_file: str = _setting(NONE, "file with a bearer token or USER:PASSWORD for it")
    profile_push_authority: str = _setting(NONE, "who signed its certificate; none: the system's authorities")
    gpu: bool = _setting(True, "read the counters of the node's GPUs", begins="GPU and network counters")
    gpu_interval_seconds: float = _setting(1.0, "how often the GPUs are read", 0.1, 60)
    dcgm_url: str = _setting(NONE, "/metrics of a dcgm-exporter on this node, for GPUs without GPM")
    kubelet_socket: str = _setting(
        "/var/lib/kubelet/pod-resources/kubelet.sock", "kubelet's pod-resources socket; or none"
    )
    network: bool = _setting(True, "read the counters of the node's network ports")
    network_interval_seconds: float = _setting(10.0, "how often they are read", 1, 60)
    log_level: str = _setting("info", "least severe log line to print", choices=LOG_LEVELS, begins="paths and log")
    py_spy: str = _setting("", "path of the py-spy program (default: beside this interpreter, then PATH)")
    proc_root: str = _setting("/proc", "where the host's /proc is mounted")
    sys_root: str = _setting("/sys", "where the host's /sys is mounted")
    cgroup_root: str = _setting("/sys/fs/cgroup", "where the host's cgroups are mounted")


@dataclass(frozen=True)
class Setting:
    """A field of Config as flag and environment variable."""

    name: str
    kind: type
    default: Callable[[], Value]
    help: str
    low: float | None
    high: float | None
    choices: tuple[str, ...]
    group: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def form(self) -> str:
        """What a value looks like, by the last word of the name."""
        if self.kind is bool:
            return "true|false"
        return "|".join(self.choices) or _FORMS.get(self.name.rpartition("_")[2], "N")

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.upper()


_KINDS = {"str": str, "float": float, "int": int, "bool": bool}
_FORMS = {
    **dict.fromkeys(("node", "tenant"), "NAME"),
    **dict.fromkeys(("dir", "root"), "DIR"),
    **dict.fromkeys(("socket", "spy", "log", "file", "certificate", "key", "authority"), "FILE"),
    "listen": "HOST:PORT",
    "url": "URL",
    "bytes": "BYTES",
    "seconds": "SECONDS",
    "hertz": "HERTZ",
    "ratio": "RATIO",
}


def _settings() -> Iterator[Setting]:
    group = ""
    for one in fields(Config):
        declared = dict(one.metadata)
        group = declared.pop("begins") or group
        yield Setting(one.name, _KINDS[str(one.type)], group=group, **declared)


SETTINGS = tuple(_settings())
_BY_NAME = {setting.name: setting for setting in SETTINGS}


@dataclass(frozen=True)
class Resolved:
    """A configuration and, for every setting, where its value came from."""

    config: Config
    origins: Mapping[str, str]

    def describe(self) -> str:
        rows = [(f.name, _show(getattr(self.config, f.name)), self.origins[f.name]) for f in fields(self.config)]
        return "\n".join(f"{f'{name} = {value}':<52} # {origin}" for name, value, origin in rows)


def resolve(
    flags: Mapping[str, Value | None] | None = None,
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
    defaults: Mapping[str, Value] | None = None,
) -> Resolved:
    """Settle every setting. `flags` maps names to values, None where not given; `defaults` replaces table defaults."""
    environment = os.environ if environment is None else environment
    if file is None:
        file = next(iter(_default_files(environment)), None)
    values: dict[str, Value] = {}
    origins: dict[str, str] = {}

    def take(name: str, raw: object, origin: str, label: str) -> None:
        values[name] = _checked(_BY_NAME[name], raw, label)
        origins[name] = origin

    for setting in SETTINGS:
        default = (defaults or {}).get(setting.name, setting.default())
        take(setting.name, default, "default", setting.name)
    for name, raw in (_read_file(file) if file else {}).items():
        take(name, raw, str(file), f"{file}: {name}")
    for setting in SETTINGS:
        if setting.variable in environment:
            take(setting.name, environment[setting.variable], setting.variable, setting.variable)
    for name, flag in (flags or {}).items():
        if flag is not None:
            take(name, flag, _BY_NAME[name].flag, _BY_NAME[name].flag)
    return Resolved(_build(values), origins)


def unknown_variables(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Variables that look like settings and are none: worth a warning, since a typo would else go unseen."""
    known = {setting.variable for setting in SETTINGS} | {ENVIRONMENT_PREFIX + "CONFIG"}
    return tuple(sorted(name for name in environment if name.startswith(ENVIRONMENT_PREFIX) and name not in known))


def parse_address(text: str, label: str) -> tuple[str, int] | None:
    """Host and port of "HOST:PORT" or "[V6]:PORT"; None for "none"."""
    if text == NONE:
        return None
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535 or (":" in host and host[0] != "["):
        raise ConfigError(f"{label} = {text!r}: must be HOST:PORT (port 0 chooses a free one) or {NONE}")
    return host.strip("[]"), int(port)


def _default_files(environment: Mapping[str, str]) -> Sequence[Path]:
    named = environment.get(ENVIRONMENT_PREFIX + "CONFIG")
    if named:
        return [Path(named)]
    return [DEFAULT_FILE] if DEFAULT_FILE.is_file() else []


def _read_file(path: Path) -> Mapping[str, object]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{path}: cannot be read: {reason}") from error
    try:
        # Python 3.10 has no tomllib; the extra daemon brings tomli there.
        toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
        table: Mapping[str, object] = toml.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    for name in table:
        if name not in _BY_NAME:
            raise ConfigError(f"{path}: {name}: no such setting; there are {', '.join(_BY_NAME)}")
    return table


def _checked(setting: Setting, raw: object, label: str) -> Value:
    complaint = f"{label} = {_show(raw)}: must be "
    value: Value
    if setting.kind is bool:
        words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        if not isinstance(raw, bool) and str(raw).lower() not in words:
            raise ConfigError(complaint + "true or false")
        return raw if isinstance(raw, bool) else words[str(raw).lower()]
    if setting.kind is str:
        if not isinstance(raw, str) or any(ord(character) < 32 for character in raw):
            raise ConfigError(complaint + "one line of text")
        if setting.choices and raw not in setting.choices:
            raise ConfigError(complaint + "one of " + ", ".join(setting.choices))
        if setting.name == "node" and not raw:
            raise ConfigError(complaint + "a name")
        return raw
    try:
        if isinstance(raw, bool) or not isinstance(raw, str | int | float):
            raise ValueError
        value = setting.kind(raw) if isinstance(raw, str) or setting.kind is float else raw
        if setting.kind is int and not isinstance(value, int):
            raise ValueError
    except ValueError:
        raise ConfigError(complaint + ("a whole number" if setting.kind is int else "a number")) from None
    if not math.isfinite(value) or not (setting.low or 0) <= value <= (setting.high or math.inf):
        raise ConfigError(complaint + f"between {setting.low:g} and {setting.high:g}")
    return value


def _build(values: Mapping[str, Value]) -> Config:
    config = Config(**values)  # type: ignore[arg-type]  # _checked gave each value the kind its setting has
    parse_address(config.metrics_listen, "metrics_listen")
    address = parse_address(config.grpc_listen, "grpc_listen")
    files = (config.tls_certificate, config.tls_key, config.tls_client_authority)
    if NONE in files and set(files) != {NONE}:
        raise ConfigError("tls_certificate, tls_key and tls_client_authority belong together: set all three or none")
    if config.metrics_tls and NONE in files:
        raise ConfigError(
            "metrics_tls = true needs certificates; set tls_certificate, tls_key and tls_client_authority"
        )
    if address and NONE in files and not is_loopback(address[0]):
        raise ConfigError(
            f"grpc_listen = {config.grpc_listen!r}: others can reach this address and there is no TLS; "
            "set tls_certificate, tls_key and tls_client_authority (see docs/tls.md), or listen on 127.0.0.1"
        )
    _check_profile_push(config)
    return config


def _check_profile_push(config: Config) -> None:
    url, tenant = config.profile_push_url, config.profile_push_tenant
    token_file, authority = config.profile_push_token_file, config.profile_push_authority
    if url == NONE:
        if {tenant, token_file, authority} != {NONE}:
            raise ConfigError("profile_push_tenant, _token_file and _authority need profile_push_url: set it as well")
        return
    if config.profile_dir == NONE:
        raise ConfigError("profile_push_url: profiles are not kept, so there are none to send; set profile_dir as well")
    try:
        parts = urlsplit(url)
        host, is_secret_free = parts.hostname, parts.username is None and not parts.query and not parts.fragment
        is_right = parts.scheme in ("http", "https") and bool(host) and (parts.port or 1) > 0
    except ValueError:
        host, is_right, is_secret_free = None, False, "@" not in url
    if not is_secret_free:  # and not shown
        raise ConfigError("profile_push_url: must not hold a user or a query; set profile_push_token_file instead")
    if not is_right or host is None:
        raise ConfigError(f"profile_push_url = {url!r}: must be like https://pyroscope.example:4040")
    if token_file != NONE and parts.scheme == "http" and not is_loopback(host):
        raise ConfigError("profile_push_token_file: others could read the token on the way; use https")
    if authority != NONE and parts.scheme == "http":
        raise ConfigError("profile_push_authority: there is no certificate without TLS; use https, or leave it out")
    if tenant != NONE and re.fullmatch(r"[A-Za-z0-9!_.*'()-]{1,150}", tenant) is None:
        raise ConfigError(f"profile_push_tenant = {tenant!r}: must be up to 150 letters, digits and !-_.*'()")


def _show(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) and not _looks_numeric(value) else str(value)


def _looks_numeric(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
