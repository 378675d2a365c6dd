"""Captures and fleet reports go to a real S3 API, which is down at first."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import pytest

from rankscope.cli.messages import Exit
from rankscope.daemon.captures.orders import Recording
from rankscope.daemon.captures.processing.delivery import LocalArchive
from rankscope.daemon.captures.records import Delivered
from rankscope.daemon.captures.store import Store
from rankscope.daemon.samples import RankProcess
from rankscope.v1 import capture_service_pb2 as pb
from tests.free_ports import free_port
from tests.support.prometheus_server import prometheus_server
from tests.support.waiting import wait_until
from tests.unit.analysis.traces.step_files import StepFile

ID = "c-20261115-120000-abcdef"
PATIENCE_SECONDS = 180.0


class Troubled(ThreadingHTTPServer):
    """Passes requests on to a server, but for the first few that write, which it answers with an error."""

    daemon_threads = True

    def __init__(self, port: int, failures: int) -> None:
        super().__init__(("127.0.0.1", 0), _PassingOn)
        self.port, self.failures = port, failures
        self.answers: list[tuple[str, int]] = []  # to what writes
        self.lock = threading.Lock()


class _PassingOn(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Troubled

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with self.server.lock:
            fails = self.command == "PUT" and self.server.failures > 0
            self.server.failures -= fails
        if fails:
            status, answer = 500, b"<Error><Code>InternalError</Code><Message>We are down</Message></Error>"
        else:
            connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=PATIENCE_SECONDS)
            connection.request(self.command, self.path, body, dict(self.headers))
            response = connection.getresponse()
            status, answer = response.status, response.read()
        if self.command == "PUT":
            with self.server.lock:
                self.server.answers.append((self.path, status))
        self.send_response(status)
        for name, value in [] if fails else response.getheaders():
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        length = response.getheader("Content-Length") if self.command == "HEAD" and not fails else None
        self.send_header("Content-Length", length or str(len(answer)))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else answer)

    def do_GET(self) -> None:
        self._pass_on()

    def do_PUT(self) -> None:
        self._pass_on()

    def do_HEAD(self) -> None:
        self._pass_on()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as the standard library calls it
        pass


@contextmanager
def _s3(tmp_path: Path) -> Iterator[int]:
    """A moto server, which answers as S3 does; its port."""
    port = free_port()
    with (tmp_path / "moto.log").open("wb") as log:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:

            def listens() -> bool:
                assert server.poll() is None, (tmp_path / "moto.log").read_text()
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                except OSError:
                    return False
                return True

            wait_until(listens, (tmp_path / "moto.log").read_text)
            yield port
        finally:
            server.kill()
            server.wait()


@contextmanager
def _troubled(port: int, failures: int) -> Iterator[Troubled]:
    proxy = Troubled(port, failures)
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.shutdown()
        proxy.server_close()


def _client(port: int) -> Any:
    return boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}")


def _deliver(archive: LocalArchive, cancelled: threading.Event | None = None) -> dict[int, Delivered]:
    recorded = {}
    for rank in (0, 1):
        path = archive.workspace(ID).folder / f"rank{rank}.json"
        path.write_bytes(StepFile(pid=7 + rank).text())
        process = RankProcess("train-7b", rank, rank, 2, 9000 + rank, 1, (9000 + rank, 7 + rank))
        recorded[rank] = (process, Recording(path, is_trace=True))
    capture = pb.Capture(id=ID, job="train-7b", ranks=[pb.RankCapture(rank=rank) for rank in (0, 1)])
    delivered = dict(archive.deliver(capture, recorded, 2, {}, cancelled or threading.Event()))
    assert all(isinstance(one, Delivered) for one in delivered.values()), delivered
    return {rank: one for rank, one in delivered.items() if isinstance(one, Delivered)}


@pytest.fixture
def s3_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in [name for name in os.environ if name.startswith(("AWS_", "FSSPEC_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    # The client shall not try again by itself: this is about us.
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_artifacts_reach_a_real_s3_api_that_fails_twice_first(
    tmp_path: Path, s3_environment: pytest.MonkeyPatch
) -> None:
    with _s3(tmp_path) as port, _troubled(port, failures=2) as troubled:
        _client(port).create_bucket(Bucket="traces")
        s3_environment.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{troubled.server_port}")
        store = Store(tmp_path / "captures")
        delivered = _deliver(LocalArchive(store, "n", upload_url="s3://traces/fleet"))
        keys = [f"/traces/fleet/train-7b/{ID}/rank{rank}.json.gz" for rank in (0, 1)]
        assert [(path.split("?")[0], status) for path, status in troubled.answers] == [
            (keys[0], 500), (keys[0], 500), (keys[0], 200), (keys[1], 200),
        ]  # fmt: skip
        for rank, one in delivered.items():
            assert (one.uri, one.notes) == (f"s3:/{keys[rank]}", ())
            artifact, size = store.open(ID, rank)
            with artifact:
                uploaded = _client(port).get_object(Bucket="traces", Key=keys[rank].removeprefix("/traces/"))
                assert uploaded["Body"].read() == artifact.read()
            assert size == one.size_bytes


def test_a_cancelled_upload_ends_at_once_and_keeps_the_artifact(
    tmp_path: Path, s3_environment: pytest.MonkeyPatch
) -> None:
    class Deaf(_PassingOn):
        def _pass_on(self) -> None:
            asked.set()
            cancelled.wait(PATIENCE_SECONDS)

    asked, cancelled = threading.Event(), threading.Event()
    with _troubled(0, failures=0) as troubled:
        troubled.RequestHandlerClass = Deaf
        s3_environment.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{troubled.server_port}")
        store = Store(tmp_path / "captures")
        threading.Thread(target=lambda: asked.wait(PATIENCE_SECONDS) and cancelled.set(), daemon=True).start()
        delivered = _deliver(LocalArchive(store, "n", upload_url="s3://traces/fleet"), cancelled)
    assert asked.is_set()
    for rank, one in delivered.items():
        assert one.uri == "" and store.open(ID, rank)[1] == one.size_bytes
        assert one.notes[0].endswith("cancelled")


def test_a_missing_bucket_is_noted_and_not_created(tmp_path: Path, s3_environment: pytest.MonkeyPatch) -> None:
    with _s3(tmp_path) as port:
        s3_environment.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        store = Store(tmp_path / "captures")
        delivered = _deliver(LocalArchive(store, "node-7", upload_url="s3://no-such-bucket/x"))
        for rank, one in delivered.items():
            assert one.uri == "" and store.open(ID, rank)[1] == one.size_bytes
            (note,) = one.notes
            assert note.startswith("not uploaded, kept on node-7: s3://no-such-bucket/x/train-7b/")
            assert "bucket does not exist" in note and "secret" not in note
        assert _client(port).list_buckets()["Buckets"] == []


def test_artifacts_reach_a_shared_folder(tmp_path: Path) -> None:
    store = Store(tmp_path / "captures")
    delivered = _deliver(LocalArchive(store, "n", upload_url=f"file://{tmp_path}/shared"))
    for rank, one in delivered.items():
        assert one.uri == f"file://{tmp_path}/shared/train-7b/{ID}/rank{rank}.json.gz"
        assert Path(one.uri.removeprefix("file://")).stat().st_size == one.size_bytes


def _report_fleet(prometheus: str, url: str) -> subprocess.CompletedProcess[str]:
    program = "from rankscope.cli.main import main; import sys; sys.exit(main())"
    command = [sys.executable, "-c", program, "report", "fleet", "--prometheus", prometheus, "--since", "1h"]
    return subprocess.run([*command, "--upload", url], capture_output=True, text=True, timeout=PATIENCE_SECONDS)


def test_a_fleet_report_reaches_a_real_s3_api(tmp_path: Path, s3_environment: pytest.MonkeyPatch) -> None:
    def answer(form: dict[str, str], _: dict[str, str]) -> tuple[int, object]:
        info = {"metric": {"run": "train-7b", "world_size": "2"}, "value": [0, "6"]}
        result = [info] if "rankscope_job_info" in form["query"] else []
        return 200, {"status": "success", "data": {"resultType": "vector", "result": result}}

    with _s3(tmp_path) as port, _troubled(port, failures=1) as troubled, prometheus_server(answer) as prometheus:
        client = _client(port)
        client.create_bucket(Bucket="reports")
        s3_environment.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{troubled.server_port}")
        done = _report_fleet(prometheus, "s3://reports/weekly/")
        assert done.returncode == Exit.OK and done.stdout == "", done.stderr
        keys = sorted(one["Key"] for one in client.list_objects_v2(Bucket="reports")["Contents"])
        assert [re.sub(r"\d", "0", key) for key in keys] == [
            "weekly/fleet-0000-00-00.html", "weekly/fleet-0000-00-00.json",
        ]  # fmt: skip
        document = json.loads(client.get_object(Bucket="reports", Key=keys[1])["Body"].read())
        assert document["complete"] and document["runs"] == 1
        missing = _report_fleet(prometheus, "s3://no-such-bucket/x")
        assert missing.returncode == Exit.USAGE and "--upload s3://no-such-bucket/x/fleet-" in missing.stderr
        assert [one["Name"] for one in client.list_buckets()["Buckets"]] == ["reports"]
