from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rankscope.operator.kube.api_client import Api, ClusterError, GoneError, UnreachableError


@pytest.mark.parametrize("text", ["not: [yaml", "scalar", "[1, 2]", "clusters: 5", ""])
def test_an_unreadable_kubeconfig_is_one_line_with_the_next_step(tmp_path: Path, text: str) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(text)
    with pytest.raises(ClusterError, match=r"\Acannot reach a cluster: .*; name a --kubeconfig, or run in a pod\Z"):
        Api(path)


def answering(status: int, body: dict[str, Any]) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: Any) -> None: ...  # noqa: A002 - the name the standard library gave it

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.mark.parametrize(
    ("causes", "error"),
    [([{"reason": "ResourceVersionTooLarge"}], GoneError), ([], UnreachableError)],
    ids=["restored from a backup", "overloaded"],
)
def test_a_stale_server_is_relisted_and_a_slow_one_retried(
    tmp_path: Path, causes: list[dict[str, str]], error: type[Exception]
) -> None:
    server = answering(504, {"kind": "Status", "code": 504, "reason": "Timeout", "details": {"causes": causes}})
    document = {
        "current-context": "c",
        "clusters": [{"name": "k", "cluster": {"server": f"http://127.0.0.1:{server.server_address[1]}"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(document))
    try:
        with pytest.raises(error):
            next(Api(tmp_path / "kubeconfig").watch("/api/v1/pods", 5.0, resourceVersion="99"))
    finally:
        server.shutdown()
        server.server_close()
