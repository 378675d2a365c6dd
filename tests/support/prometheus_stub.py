"""A server that answers queries of PromQL as the test says, for what a real Prometheus never does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.support.prometheus_server import prometheus_server

HOSTILE = "x\x1b[31m<script>alert(1)</script>"
Answer = Callable[[str], tuple[int, object]]  # status and document, by query


@contextmanager
def server(answer: Answer, seen: list[tuple[str, dict[str, str]]] | None = None) -> Iterator[str]:
    def answered(form: dict[str, str], headers: dict[str, str]) -> tuple[int, object]:
        if seen is not None:
            seen.append((form["query"], headers))
        return answer(form["query"])

    with prometheus_server(answered) as url:
        yield url


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
