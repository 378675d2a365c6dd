"""Fleet reports for the API and the console: from Prometheus, in the background, or from memory where none is known.

A request never waits for Prometheus: it gets the report, or how far it is. One report is made at a time, with smaller
queries than those of the command, and kept for some minutes. It covers all namespaces: the caller of this module has
authorised that."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

import msgspec

from rankscope.analysis.fleet.facts import FleetFacts
from rankscope.analysis.fleet.report import FleetReport, make_report
from rankscope.common.text import one_line
from rankscope.operator.correlation.fleet_usage import FleetUsage
from rankscope.operator.fleet_history import HistoryError, read_facts
from rankscope.operator.prometheus_api import Failure, PrometheusApi
from rankscope.v1.job_service_pb2 import GetFleetReportResponse

log = logging.getLogger(__name__)

PERIODS: Final[Mapping[str, float]] = {"24h": 86_400.0, "7d": 7 * 86_400.0, "30d": 30 * 86_400.0}
NO_PERIOD: Final = f"a server makes reports of {', '.join(PERIODS)}; ask for one of these"
QUERY_SECONDS: Final = 30.0
MAX_ANSWER_BYTES: Final = 8 << 20
MAX_ROWS_READ: Final = 50_000  # of one question
MAX_MAKING_SECONDS: Final = 600.0
# How long it is not made again: a report from Prometheus, one from memory, and a failure.
KEPT_SECONDS: Final = 600.0
MEMORY_SECONDS: Final = 30.0
FAILED_SECONDS: Final = 15.0
# Of each list of a report, whichever fits. A message of gRPC has at most 4 MB by default.
MAX_ROWS: Final = (2000, 200, 20)
MAX_REPORT_BYTES: Final = 3 << 20
MAX_REASON_CHARACTERS: Final = 300
_LISTS: Final = ("teams", "by_run", "by_node", "hardware", "low_teams", "low_runs", "packing")
_NEXT_STEPS: Final = {
    Failure.UNREACHABLE: "see that it runs, and that this server reaches the address in --prometheus-url",
    Failure.REFUSED: (
        "name an address that answers without a login in --prometheus-url, or use "
        "`rankscope report fleet --prometheus URL --token-file FILE`"
    ),
    Failure.NO_API: "see that --prometheus-url is the address of its API",
    Failure.EMPTY: "see that it scrapes daemons and operator (docs/metrics.md#scraping), or choose a longer time",
}


class _StoppedError(Exception):
    """The server ends, or Prometheus takes too long."""


class FleetReports:
    """Thread-safe."""

    def __init__(
        self,
        usage: FleetUsage,
        prometheus_url: str = "",
        monotonic_seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        self._usage = usage
        self._monotonic_seconds = monotonic_seconds
        self._lock = threading.Lock()
        self._api: PrometheusApi | None = None
        # By period, with the monotonic time until which it counts.
        self._kept: dict[str, tuple[float, GetFleetReportResponse]] = {}
        self._under_way: tuple[int, int] | None = None  # pages that are done, and all; None: nothing is made
        self._failure = ""  # the latest
        self._is_closing = False
        self.use(prometheus_url)

    def use(self, prometheus_url: str) -> None:
        """Raises ValueError for an address that is none; empty for no Prometheus."""
        api = PrometheusApi(prometheus_url, QUERY_SECONDS, MAX_ANSWER_BYTES) if prometheus_url else None
        with self._lock:
            self._api = api
            self._kept.clear()

    def close(self) -> None:
        """Ends what is under way, after its next page."""
        self._is_closing = True

    def get(self, period: str) -> GetFleetReportResponse:
        """Of one of PERIODS."""
        with self._lock:
            until, kept = self._kept.get(period, (0.0, None))
            if kept is not None and self._monotonic_seconds() < until:
                return kept
            if self._api is None:
                answer = _made(make_report(self._usage.facts()))
                self._kept[period] = (self._monotonic_seconds() + MEMORY_SECONDS, answer)
                return answer
            if self._under_way is None and not self._is_closing:
                self._under_way = (0, 0)
                arguments = (period, self._api)
                threading.Thread(target=self._make, args=arguments, name="rankscope-report", daemon=True).start()
            done, pages = self._under_way or (0, 0)
            return GetFleetReportResponse(pages_done=done, pages=pages)

    def _make(self, period: str, api: PrometheusApi) -> None:
        answer = _failed("the report failed", "the log of this server has the reason; please report it")
        give_up_at = self._monotonic_seconds() + MAX_MAKING_SECONDS

        def progress(done: int, pages: int) -> None:
            if self._is_closing or self._monotonic_seconds() > give_up_at:
                raise _StoppedError(f"Prometheus is too slow: {done} of {pages} pages in {MAX_MAKING_SECONDS:.0f} s")
            self._under_way = (done, pages)

        try:
            facts = read_facts(api, PERIODS[period], time.time(), progress, MAX_ROWS_READ)
            answer = _of_one_cluster(facts)
        except HistoryError as error:
            reason = one_line(f"Prometheus: {error}", MAX_REASON_CHARACTERS)
            if reason != self._failure:  # an open page asks again and again
                log.warning("no fleet report of %s: %s", period, reason)
            self._failure = reason
            answer = _failed(reason, _NEXT_STEPS[error.failure])
        except _StoppedError as error:
            answer = _failed(str(error), "choose a shorter time, or use `rankscope report fleet --prometheus URL`")
        except Exception:
            log.exception("no fleet report of %s", period)
        finally:
            kept_seconds = FAILED_SECONDS if answer.failure else KEPT_SECONDS
            with self._lock:
                if api is self._api:
                    self._kept[period] = (self._monotonic_seconds() + kept_seconds, answer)
                self._under_way = None


def _of_one_cluster(facts: FleetFacts) -> GetFleetReportResponse:
    """Who may see all namespaces of this cluster may not see other clusters."""
    clusters = {key[0] for key in facts.runs} | {key[0] for key in facts.used.sums("cluster")}
    if len(clusters) > 1:
        return _failed(
            f"Prometheus has {len(clusters)} clusters",
            "name one of this cluster in --prometheus-url; `rankscope report fleet --prometheus URL` reports on all",
        )
    return _made(make_report(facts))


def _made(report: FleetReport) -> GetFleetReportResponse:
    content = b""
    for rows in MAX_ROWS:
        content = msgspec.json.encode(_with_rows(report, rows))
        if len(content) <= MAX_REPORT_BYTES:
            return GetFleetReportResponse(report=content, made_unix_nanos=time.time_ns())
    return _failed("the report is too long for an answer", "use `rankscope report fleet --prometheus URL`")


def _with_rows(report: FleetReport, rows: int) -> FleetReport:
    cut = {name: getattr(report, name)[:rows] for name in _LISTS if len(getattr(report, name)) > rows}
    said = [f"{name}: the first {rows} of {len(getattr(report, name))}" for name in cut]
    return replace(report, **cut, problems=(*report.problems, *said))


def _failed(failure: str, next_step: str) -> GetFleetReportResponse:
    return GetFleetReportResponse(failure=failure, next_step=next_step)
