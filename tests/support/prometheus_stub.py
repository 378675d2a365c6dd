"""A server that answers queries of PromQL as the test says, for what a real Prometheus never does."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

HOSTILE = "x\x1b[31m<script>alert(1)</script>"
Answer = Callable[[str], tuple[int, object]]  # status and document, by query


@contextmanager
def server(answer: Answer, seen: list[tuple[str, dict[str, str]]] | None = None) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
            if seen is not None:
                seen.append((form["query"][0], dict(self.headers.items())))
            status, document = answer(form["query"][0])
            body = document if isinstance(document, bytes) else json.dumps(document).encode()
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    served = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=served.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{served.server_address[1]}"
    finally:
        served.shutdown()
        served.server_close()


def series(*rows: tuple[dict[str, str], float]) -> tuple[int, object]:
    result = [{"metric": labels, "value": [0, str(value)]} for labels, value in rows]
    return 200, {"status": "success", "data": {"resultType": "vector", "result": result}}


def of_a_run(query: str) -> tuple[int, object]:
    run = {"run_namespace": "t", "run": HOSTILE}
    if "rankscope_job_info" in query:
        return series(({**run, "world_size": "9" * 50, "team": HOSTILE, "command": HOSTILE}, 6.0))
    if query.startswith("sum_over_time((count by (cluster, run_namespace"):
        return series(({**run, "node": HOSTILE}, 6.0), ({**run, "node": "n"}, float("nan")))
    return series()
