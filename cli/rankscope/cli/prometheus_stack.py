"""A real Prometheus and a real Alertmanager beside the standalone stack, with Rankscope's rules: what
`rankscope up --prometheus` starts."""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankscope.cli.demo_job import tether as tethering
from rankscope.cli.demo_job.environment import choose_port
from rankscope.common.http_client import server_url
from rankscope.common.http_server import is_loopback

_UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000, "y": 31_536_000_000}
_DURATION = r"(?:\d+(?:ms|[smhdwy]))+"
# Where durations occur: `for`, Alertmanager's grouping (but not its repeat interval), ranges, offsets; then the steps
# of subqueries.
_PLACES = (
    re.compile(
        rf"(?P<before>(?<![\w-])(?:for|keep_firing_for|interval|group_wait|group_interval):\s*[\"']?|\[|\boffset\s+)(?P<duration>{_DURATION})"
    ),
    re.compile(rf"(?P<before>\[{_DURATION}:)(?P<duration>{_DURATION})"),
)
FOLDER_VARIABLE = "RANKSCOPE_PROMETHEUS_DIR"
_HERE = Path(__file__).resolve().parent
_CHECKOUT = _HERE.parents[2]
# Debian uses another name for one of them.
_SPELLINGS = {"prometheus": ("prometheus",), "alertmanager": ("alertmanager", "prometheus-alertmanager")}
CAPTURE_RECEIVER = "rankscope-capture"  # receiver name in the example
# In the rules, a link of an alert is a comment with one of these addresses until the real one is put in.
LINKS = {
    "runbook_url": "https://runbooks.example",
    "dashboard_url": "https://grafana.example",
    "console_url": "https://console.example",
}
MIN_GROUP_SECONDS = 1.0
# A range of the rules must hold a few scrapes.
SCRAPES_PER_RANGE = 5


def add_prometheus_url_argument(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--prometheus-url",
        type=_server,
        default="",
        metavar="URL",
        help="Prometheus that scrapes Rankscope, as in http://prometheus:9090: the console shows the time before this "
        "process began from there (default: what is in memory only)",
    )


def _server(url: str) -> str:
    try:
        if url:
            server_url(url)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return url


# Faster rules: the same expressions, thresholds and labels, with every duration divided.


def hurry(rules: str, factor: float, least_seconds: float) -> str:
    """The text of a rules file (or of Alertmanager's configuration) with its durations divided by `factor`.

    For trying alerts in seconds with the real rules. No duration becomes shorter than `least_seconds`: a range must
    hold a few scrapes, so it should be several times the scrape interval."""

    def shorten(match: re.Match[str]) -> str:
        asked_ms = milliseconds(match["duration"])
        return match["before"] + f"{round(min(asked_ms, max(asked_ms / factor, least_seconds * 1000)))}ms"

    if factor != 1:
        for place in _PLACES:
            rules = place.sub(shorten, rules)
    return rules


def milliseconds(duration: str) -> int:
    """A Prometheus duration (5m, 1h30m, 500ms) in milliseconds."""
    parts = re.findall(r"(\d+)(ms|[smhdwy])", duration)
    return sum(int(number) * _UNITS_MS[unit] for number, unit in parts)


def with_links(rules: str, addresses: Mapping[str, str]) -> str:
    """The text of a rules file, with those of its LINKS that have an address."""
    for link, address in addresses.items():
        rules = rules.replace(f"# {link}: '{LINKS[link]}", f"{link}: '{address.rstrip('/')}")
    return rules


# The binaries of Prometheus and Alertmanager, and Rankscope's rules.


class StackError(Exception):
    """Prometheus or Alertmanager cannot run: which, why and what to do."""


@dataclass(frozen=True)
class Binaries:
    prometheus: Path
    alertmanager: Path


def find_binaries() -> Binaries:
    found = {name: _find(name) for name in _SPELLINGS}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        raise StackError(
            f"{' and '.join(missing)}: not in {FOLDER_VARIABLE}, not on the PATH; next: apt-get install "
            f"--no-install-recommends prometheus prometheus-alertmanager, or name a folder in {FOLDER_VARIABLE}"
        )
    return Binaries(**{name: path for name, path in found.items() if path is not None})


def _find(name: str) -> Path | None:
    # The copy from tools/setup_prometheus.sh comes last: installed programs take precedence.
    folders = (os.environ.get(FOLDER_VARIABLE), os.environ.get("PATH"), str(_CHECKOUT / ".prometheus" / "bin"))
    for folder in filter(None, folders):
        for spelling in _SPELLINGS[name]:
            if found := shutil.which(spelling, path=folder):
                return Path(found).resolve()
    return None


@dataclass(frozen=True)
class Rules:
    files: tuple[Path, ...]
    alertmanager_example: Path


def find_rules() -> Rules:
    """The rules in the wheel, or those of the checkout."""
    for folder in (_HERE / "rules", _CHECKOUT / "rules"):
        files = sorted(path for path in folder.glob("*.yaml") if not path.name.endswith(".example.yaml"))
        example = folder / "alertmanager.example.yaml"
        if files and example.is_file():
            return Rules(tuple(files), example)
    raise StackError("the alerting rules are missing from this installation; install Rankscope again")


@dataclass(frozen=True)
class Pace:
    """Scrape and evaluation interval, and the divisor of the rules' durations."""

    interval_seconds: float = 5.0
    hurry_factor: float = 1.0

    @property
    def least_range_seconds(self) -> float:
        return SCRAPES_PER_RANGE * self.interval_seconds


def prometheus_config(pace: Pace, rules: Path, daemon: str, alertmanager: str) -> dict[str, Any]:
    """JSON is YAML. `daemon` and `alertmanager` are HOST:PORT; `rules` is a directory."""
    interval = _milliseconds(pace.interval_seconds)
    return {
        "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
        "rule_files": [str(rules / "*.yaml")],
        "scrape_configs": [{"job_name": "rankscope", "static_configs": [{"targets": [daemon]}]}],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]},
    }


def alertmanager_config(
    pace: Pace, example: str, receiver_url: str, token_file: Path, webhook_url: str | None
) -> dict[str, Any]:
    """The example that comes with the rules, with receivers that exist: Rankscope's for captures, and the webhook
    for notifications to people."""
    config: dict[str, Any] = _read_yaml(hurry(example, pace.hurry_factor, MIN_GROUP_SECONDS))
    authorization = {"type": "Bearer", "credentials_file": str(token_file)}
    captures = {"url": receiver_url, "send_resolved": False, "http_config": {"authorization": authorization}}
    others = [] if webhook_url is None else [{"url": webhook_url, "send_resolved": True}]
    config["receivers"] = [
        {"name": receiver["name"], "webhook_configs": [captures] if receiver["name"] == CAPTURE_RECEIVER else others}
        for receiver in config["receivers"]
    ]
    return config


def _read_yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise StackError("--prometheus needs PyYAML; next: pip install 'rankscope[cli]'") from error
    return yaml.safe_load(text)


def _milliseconds(seconds: float) -> str:
    return f"{round(seconds * 1000)}ms"


# The two programs.


log = logging.getLogger(__name__)

START_SECONDS = 60.0
STOP_SECONDS = 10.0
PORT_ATTEMPTS = 3
RETENTION = ("--storage.tsdb.retention.time=7d", "--storage.tsdb.retention.size=1GB")


@dataclass(frozen=True)
class StackSettings:
    binaries: Binaries
    pace: Pace
    prometheus_address: tuple[str, int] = ("127.0.0.1", 0)
    alertmanager_address: tuple[str, int] = ("127.0.0.1", 0)
    folder: Path | None = None  # None: a temporary directory, removed with the stack
    webhook_url: str | None = None


class PrometheusStack:
    """From `start` to `stop`; both programs die with the thread that called `start`, so call it from the main
    thread."""

    def __init__(self, settings: StackSettings) -> None:
        self._settings = settings
        self._programs: list[_Program] = []
        self._folder: Path | None = None
        self.prometheus_url = self.alertmanager_url = ""

    @property
    def folder(self) -> Path:
        assert self._folder is not None  # set by start()
        return self._folder

    def start(self, metrics_url: str, receiver_url: str, token_file: Path, console_url: str | None = None) -> None:
        """Returns when both are ready. Raises StackError and leaves nothing behind if one is not. Alerts have a link to
        the console, if there is one."""
        try:
            self._folder = self._make_folder()
            self._start_alertmanager(receiver_url, token_file)
            self._start_prometheus(metrics_url, console_url)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        for program in reversed(self._programs):
            program.stop()
        self._programs = []
        if self._folder is not None and self._settings.folder is None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None

    def _make_folder(self) -> Path:
        if self._settings.folder is None:
            return Path(tempfile.mkdtemp(prefix="rankscope-prometheus-"))
        folder = self._settings.folder.absolute()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StackError(f"{folder} cannot be made: {error.strerror}; pass another --prometheus-dir") from error
        return folder

    def _start_alertmanager(self, receiver_url: str, token_file: Path) -> None:
        settings, folder = self._settings, self.folder
        example = find_rules().alertmanager_example.read_text()
        config = alertmanager_config(settings.pace, example, receiver_url, token_file, settings.webhook_url)
        path = _write(folder / "alertmanager.yml", config)
        # No gossip: it would open a public port.
        flags = (f"--config.file={path}", f"--storage.path={folder / 'alertmanager'}", "--cluster.listen-address=")
        binary = settings.binaries.alertmanager
        self.alertmanager_url = self._run("alertmanager", binary, flags, settings.alertmanager_address)

    def _start_prometheus(self, metrics_url: str, console_url: str | None) -> None:
        settings, folder = self._settings, self.folder
        rules = folder / "rules"
        shutil.rmtree(rules, ignore_errors=True)  # left by an earlier run in the same directory
        rules.mkdir()
        addresses = {} if console_url is None else {"console_url": console_url}
        for file in find_rules().files:
            text = hurry(file.read_text(), settings.pace.hurry_factor, settings.pace.least_range_seconds)
            (rules / file.name).write_text(with_links(text, addresses))
        daemon, alertmanager = _address_of(metrics_url), _address_of(self.alertmanager_url)
        path = _write(folder / "prometheus.yml", prometheus_config(settings.pace, rules, daemon, alertmanager))
        flags = (f"--config.file={path}", f"--storage.tsdb.path={folder / 'prometheus'}", *RETENTION)
        binary = settings.binaries.prometheus
        self.prometheus_url = self._run("prometheus", binary, flags, settings.prometheus_address)

    def _run(self, name: str, binary: Path, flags: Sequence[str], address: tuple[str, int]) -> str:
        """Start a program and return its URL once it is ready."""
        host, port = address
        for attempt in range(PORT_ATTEMPTS):
            program = _Program(name, binary, flags, host, port or choose_port(), self.folder)
            if program.wait_until_ready():
                self._programs.append(program)
                program.watch()
                return program.url
            taken = "address already in use" in program.log_tail()
            if port or not taken or attempt == PORT_ATTEMPTS - 1:
                step = f"pass another --{name}-listen" if taken else "its last words are above"
                raise StackError(f"{program.log_tail()}\n{name} did not start on {host}:{program.port}; {step}")
        raise AssertionError("unreachable")


class _Program:
    """A running program."""

    def __init__(self, name: str, binary: Path, flags: Sequence[str], host: str, port: int, folder: Path) -> None:
        self.name, self.port = name, port
        shown_host = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown_host}:{port}"
        self._ready_url = f"{self.url if is_loopback(host) else f'http://127.0.0.1:{port}'}/-/ready"
        self._log_path = folder / f"{name}.log"
        self._is_stopping = threading.Event()
        listening = (f"--web.listen-address={shown_host}:{port}", f"--web.external-url={self.url}")
        tether = (sys.executable, "-I", "-S", tethering.__file__, str(os.getpid()))
        with self._log_path.open("wb") as output:
            self._process = subprocess.Popen(
                [*tether, str(binary), *flags, *listening],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches this process only; it ends the program in order
            )

    def wait_until_ready(self) -> bool:
        """False if it ended instead."""
        give_up_at = time.monotonic() + START_SECONDS
        try:
            while self._process.poll() is None:
                with suppress(OSError), urllib.request.urlopen(self._ready_url, timeout=5) as answer:
                    # The port may be in use by another program; then ours is about to report it.
                    if answer.status == 200 and self._process.poll() is None:
                        return True
                if time.monotonic() > give_up_at:
                    raise StackError(f"{self.log_tail()}\n{self.name} is not ready after {START_SECONDS:g} s")
                time.sleep(0.1)
        except BaseException:
            self.stop()
            raise
        return False

    def watch(self) -> None:
        """Report if it ends by itself."""

        def wait() -> None:
            code = self._process.wait()
            if not self._is_stopping.is_set():
                log.error("%s ended with %d: no alerts from now on; see %s", self.name, code, self._log_path)

        threading.Thread(target=wait, name=f"rankscope-{self.name}", daemon=True).start()

    def stop(self) -> None:
        self._is_stopping.set()
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def log_tail(self, lines: int = 5) -> str:
        return "\n".join(self._log_path.read_text(errors="replace").splitlines()[-lines:])


def _write(path: Path, config: object) -> Path:
    path.write_text(json.dumps(config, indent=2) + "\n")
    return path


def _address_of(url: str) -> str:
    return url.removeprefix("http://").partition("/")[0]
