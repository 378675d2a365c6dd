"""A server that speaks Prometheus' HTTP API and answers what a test wants."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

# By the form and the headers of a query: status, and a document or bytes.
Answer = Callable[[dict[str, str], dict[str, str]], tuple[int, object]]


@contextmanager
def prometheus_server(answer: Answer) -> Iterator[str]:
    """Its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
            status, document = answer({name: value[0] for name, value in form.items()}, dict(self.headers.items()))
            body = document if isinstance(document, bytes) else json.dumps(document).encode()
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    served = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=served.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{served.server_address[1]}"
    finally:
        served.shutdown()
        served.server_close()
