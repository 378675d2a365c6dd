"""Runs a real Prometheus and a real Alertmanager beside the standalone stack, with Rankscope's rules."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rankscope.cli.demo_job import tether as tethering
from rankscope.cli.demo_job.environment import choose_port
from rankscope.cli.prometheus_stack.config import (
    Binaries,
    Pace,
    StackError,
    alertmanager_config,
    find_rules,
    hurry,
    prometheus_config,
)
from rankscope.common.http_server import is_loopback

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

    def start(self, metrics_url: str, receiver_url: str, token_file: Path) -> None:
        """Returns when both are ready. Raises StackError and leaves nothing behind if one is not."""
        try:
            self._folder = self._make_folder()
            self._start_alertmanager(receiver_url, token_file)
            self._start_prometheus(metrics_url)
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

    def _start_prometheus(self, metrics_url: str) -> None:
        settings, folder = self._settings, self.folder
        rules = folder / "rules"
        shutil.rmtree(rules, ignore_errors=True)  # left by an earlier run in the same directory
        rules.mkdir()
        for file in find_rules().files:
            text = hurry(file.read_text(), settings.pace.hurry_factor, settings.pace.least_range_seconds)
            (rules / file.name).write_text(text)
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
