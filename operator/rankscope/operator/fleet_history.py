"""The facts of a fleet report, from Prometheus.

The server adds up: a question is a PromQL expression that is summed over a page of time by a subquery, so an answer has
a row per run and node, whatever the number of ranks and scrapes. A page that fails is asked again in halves, and what
still fails becomes a sentence of the report. The steps of a subquery are minutes apart, so a shorter run may be
missed."""

from __future__ import annotations

import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Final

from rankscope.analysis.fleet.facts import (
    CULPRIT_LABELS,
    LOST_LABELS,
    RUN_LABELS,
    USED_LABELS,
    UTILIZATION_BUCKETS,
    Figures,
    FleetFacts,
    Program,
    RunFacts,
    RunKey,
)
from rankscope.analysis.fleet.tables import moment
from rankscope.common.http_client import REQUEST_FAILURES
from rankscope.operator.prometheus_api import (
    NO_SERIES,
    Failure,
    PrometheusApi,
    QueryError,
    failure_of,
    may_answer_less,
    quoted,
    reason,
)

HOUR_SECONDS: Final = 3600
PAGE_SECONDS: Final = 24 * HOUR_SECONDS
MIN_PAGE_SECONDS: Final = HOUR_SECONDS
# Steps of short and of long reports: a week has 672 of a quarter of an hour.
SHORT_SECONDS: Final = 24 * HOUR_SECONDS
STEP_SECONDS: Final = {True: 300, False: 900}
# Holds at least two scrapes, which a rate needs.
RATE_SECONDS: Final = 900
QUERY_SECONDS: Final = 60.0
MAX_ANSWER_BYTES: Final = 32 << 20
MAX_ROWS: Final = 400_000
MAX_PROBLEMS: Final = 20
QUERIES_AT_ONCE: Final = 4
GPUS_PER_PAGE: Final = 200
RETRY_SECONDS: Final = 1.0

_RUN: Final = ", ".join(RUN_LABELS)
_CULPRITS: Final = f"max by ({_RUN}, rank, node, phase, bound, verdict) (rankscope_job_culprit)"
# Of the ranks that are named; for a moment, one that was restarted has two.
_CULPRIT_GPU: Final = (
    f"topk by ({_RUN}, rank) (1, max by ({_RUN}, rank, gpu)"
    f" (rankscope_rank_info and on ({_RUN}, rank) rankscope_job_culprit))"
)
_LOST: Final = f"max by ({_RUN}, verdict) (rate(rankscope_job_lost_gpu_seconds_total[{RATE_SECONDS}s])) > 0"
_NAMED: Final = f"group by ({_RUN}, verdict, node, rank) (last_over_time(rankscope_job_culprit[{RATE_SECONDS}s]))"
# In place of this are the GPUs of a page.
_GPUS: Final = "$gpus"
_SHARED_PLACES: Final = f"group by ({_RUN}, node, gpu) (rankscope_rank_info{{gpu=~{_GPUS}}})"
_LONE_PLACES: Final = f'group by ({_RUN}, gpu) (rankscope_rank_info{{gpu=~{_GPUS},world_size="1"}})'


def _of_lone(metric: str, labels: str = "") -> str:
    selected = f"max by (cluster, gpu) ({metric}{{gpu=~{_GPUS}{labels}}})"
    return f"max by ({_RUN}) ({selected} * on (cluster, gpu) group_right () {_LONE_PLACES})"


def _per_run(metric: str) -> str:
    return f"max by ({_RUN}) ({metric})"


@dataclass(frozen=True)
class Question:
    """`promql` is reduced over the steps of a page by `over`; the values of pages are added up, or the largest is
    taken."""

    what: str  # for the sentence about a page that failed
    promql: str
    labels: tuple[str, ...]
    over: str = "sum"  # sum, count or max
    steps: int = 1  # how many steps of the report are one of this: a distribution needs fewer


_INFO_LABELS: Final = (*RUN_LABELS, "world_size", "team", "user", "image", "command")
QUESTIONS: Final = {
    # Ranks, of which each has a GPU of its own as a rule; `sharing` corrects the exceptions.
    "used": Question("GPU-hours used", f'count by ({_RUN}, node) (rankscope_rank_info{{gpu!=""}})', USED_LABELS),
    "shared_gpus": Question(
        "GPUs that ranks share", "group by (cluster, gpu) (rankscope_gpu_shared == 1)", ("cluster", "gpu")
    ),
    # At every step, a loss is divided among the nodes of the ranks that the verdict names.
    "lost": Question(
        "GPU-hours lost",
        f"({_LOST}) * on ({_RUN}, verdict) group_right () (count by ({_RUN}, verdict, node) ({_NAMED})"
        f" / on ({_RUN}, verdict) group_left () count by ({_RUN}, verdict) ({_NAMED}))"
        f" or on ({_RUN}, verdict) ({_LOST})",
        LOST_LABELS,
    ),
    "culprits": Question(
        "ranks that verdicts name",
        f"group by ({', '.join(CULPRIT_LABELS)}) ({_CULPRITS} * on ({_RUN}, rank) group_left (gpu) {_CULPRIT_GPU}"
        f" or on ({_RUN}, rank) {_CULPRITS})",
        CULPRIT_LABELS,
    ),
    "utilization": Question(
        "utilization of GPUs",
        f'count_values("bucket", floor(clamp_max({UTILIZATION_BUCKETS} * (rankscope_gpu_utilization_ratio'
        f' and on (cluster, gpu) rankscope_rank_info{{gpu!=""}}), {UTILIZATION_BUCKETS - 1})))',
        ("bucket",),
        steps=4,
    ),
    "without_gpu": Question(
        "ranks without a known GPU", 'count by (cluster) (rankscope_rank_info{gpu=""})', ("cluster",)
    ),
    "info": Question(
        "teams and programs of runs", f"group by ({', '.join(_INFO_LABELS)}) (rankscope_job_info)", _INFO_LABELS
    ),
    "mfu": Question("MFU", _per_run("rankscope_job_mfu_ratio"), RUN_LABELS),
    "mfu_steps": Question("MFU", _per_run("rankscope_job_mfu_ratio"), RUN_LABELS, "count"),
    "target": Question("MFU targets", _per_run("rankscope_job_mfu_target_ratio"), RUN_LABELS, "max"),
    "lone_gpus": Question(
        "runs on one GPU", 'group by (cluster, gpu) (rankscope_rank_info{gpu!="",world_size="1"})', ("cluster", "gpu")
    ),
}
# Asked of GPUs that the answer to another question names.
FOLLOWING: Final = {
    # A GPU counts once, in equal parts for the runs that use it.
    "sharing": Question(
        "GPUs that ranks share",
        f"sum by ({_RUN}, node) ({_SHARED_PLACES} / on (cluster, gpu) group_left ()"
        f" count by (cluster, gpu) ({_SHARED_PLACES}))"
        f" - count by ({_RUN}, node) (rankscope_rank_info{{gpu=~{_GPUS}}})",
        USED_LABELS,
    ),
    "lone_utilization": Question(
        "utilization of runs on one GPU", _of_lone("rankscope_gpu_utilization_ratio"), RUN_LABELS
    ),
    "lone_steps": Question(
        "utilization of runs on one GPU", _of_lone("rankscope_gpu_utilization_ratio"), RUN_LABELS, "count"
    ),
    "lone_memory": Question(
        "memory of runs on one GPU", _of_lone("rankscope_gpu_memory_bytes", ',kind="used"'), RUN_LABELS, "max"
    ),
    "lone_total": Question(
        "memory of runs on one GPU", _of_lone("rankscope_gpu_memory_bytes", ',kind="total"'), RUN_LABELS, "max"
    ),
    "lone_device": Question(
        "devices of runs on one GPU",
        f"group by ({_RUN}, name) ({_LONE_PLACES} * on (cluster, gpu) group_left (name)"
        f" topk by (cluster, gpu) (1, max by (cluster, gpu, name) (rankscope_gpu_info{{gpu=~{_GPUS}}})))",
        (*RUN_LABELS, "name"),
    ),
}
FOLLOWS: Final = {
    "shared_gpus": ("sharing",),
    "lone_gpus": tuple(name for name in FOLLOWING if name.startswith("lone_")),
}
ASKED: Final = QUESTIONS | FOLLOWING

Rows = dict[tuple[str, ...], float]


class HistoryError(Exception):
    """There is no report. The text is the reason; the next step depends on who asks."""

    def __init__(self, failure: Failure, text: str) -> None:
        super().__init__(text)
        self.failure = failure


@dataclass(frozen=True)
class Page:
    question: str
    begin: int  # Unix seconds, a multiple of the step; not part of the page
    end: int
    gpus: tuple[str, ...] = ()  # of a question that follows another

    def halves(self, step_seconds: int) -> tuple[Page, ...]:
        middle = self.begin + (self.end - self.begin) // 2 // step_seconds * step_seconds
        return (replace(self, end=middle), replace(self, begin=middle))


def read_facts(
    api: PrometheusApi,
    seconds: float,
    now: float,
    progress: Callable[[int, int], None] = lambda done, total: None,
    max_rows: int = MAX_ROWS,
) -> FleetFacts:
    """Of the last so long. Raises HistoryError if the server cannot be reached, refuses, or has nothing of ours, and
    what `progress` raises. `max_rows` are those of one question, over all pages."""
    step = STEP_SECONDS[seconds <= SHORT_SECONDS]
    end = int(now // step) * step
    begin = end - max(step, int(seconds // step) * step)
    reader = _Reader(api, step, progress, max_rows)
    reader.read(begin, end)
    if not any(reader.rows[name] for name in ("used", "info", "without_gpu")) and not reader.problems:
        raise HistoryError(Failure.EMPTY, NO_SERIES)
    return reader.facts(begin, end)


class _Reader:
    """Asks all pages, a few at a time, and adds them up."""

    def __init__(
        self, api: PrometheusApi, step_seconds: int, progress: Callable[[int, int], None], max_rows: int
    ) -> None:
        self._max_rows = max_rows
        self._api = api
        self._step_seconds = step_seconds
        self._progress = progress
        self.rows: dict[str, Rows] = {name: {} for name in ASKED}
        self.problems: dict[str, list[tuple[Page, str]]] = {}  # by what is missing

    def read(self, begin: int, end: int) -> None:
        pages = deque(
            Page(name, start, min(start + PAGE_SECONDS, end))
            for start in range(begin, end, PAGE_SECONDS)
            for name in QUESTIONS
        )
        self._ask(pages[0])  # a server that does not answer is found out once
        done, total, under_way = 0, len(pages), 0
        answers: SimpleQueue[tuple[Page, Rows | Exception]] = SimpleQueue()
        while pages or under_way:
            while pages and under_way < QUERIES_AT_ONCE:
                # Not of a pool: the end of a process waits for the threads of a pool, and so for the server.
                arguments = (pages.popleft(), answers)
                threading.Thread(target=self._answer, args=arguments, name="rankscope-fleet", daemon=True).start()
                under_way += 1
            more = self._take(*answers.get())
            pages.extend(more)
            done, total, under_way = done + 1, total + len(more), under_way - 1
            self._progress(done, total)

    def _ask(self, page: Page) -> None:
        """Raises HistoryError if no page would be answered."""
        try:
            self._api.query("vector(1)", page.end)
        except (QueryError, *REQUEST_FAILURES) as error:
            raise HistoryError(failure_of(error), reason(error)) from error

    def _answer(self, page: Page, answers: SimpleQueue[tuple[Page, Rows | Exception]]) -> None:
        found: Rows | Exception = QueryError("the query failed")
        try:
            found = self._rows(page)
        except (*REQUEST_FAILURES, QueryError) as error:
            found = error
        finally:
            answers.put((page, found))

    def _rows(self, page: Page) -> Rows:
        question = ASKED[page.question]
        # A second less: whether a range has its first moment depends on the server's version.
        span = f"[{page.end - page.begin - 1}s:{question.steps * self._step_seconds}s]"
        chosen = quoted("|".join(map(_literal, page.gpus)))
        promql = f"{question.over}_over_time(({question.promql.replace(_GPUS, chosen)}){span})"
        try:
            series = self._api.query(promql, page.end)
        except (ConnectionError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise
            time.sleep(RETRY_SECONDS)  # a server that restarts
            series = self._api.query(promql, page.end)
        rows: Rows = {}
        for one in series:
            value = math.nan if one.value is None else float(one.value[1])
            if math.isfinite(value):
                key = tuple(one.metric.get(label, "") for label in question.labels)
                rows[key] = rows.get(key, 0.0) + question.steps * value
        return rows

    def _take(self, page: Page, found: Rows | Exception) -> tuple[Page, ...]:
        """Smaller pages if the server could not answer this one, or those that follow from its answer."""
        if isinstance(found, Exception):
            if may_answer_less(found) and page.end - page.begin >= 2 * max(MIN_PAGE_SECONDS, self._step_seconds):
                return page.halves(self._step_seconds)
            self._miss(page, reason(found))
            return ()
        rows, is_most = self.rows[page.question], ASKED[page.question].over == "max"
        for key, value in found.items():
            if key not in rows and len(rows) >= self._max_rows:
                self._miss(page, f"there are more than {self._max_rows} rows")
                break
            rows[key] = max(rows.get(key, 0.0), value) if is_most else rows.get(key, 0.0) + value
        return tuple(self._following(page, found))

    def _following(self, page: Page, found: Rows) -> Iterator[Page]:
        gpus = sorted({key[1] for key in found}) if page.question in FOLLOWS else []
        for start in range(0, len(gpus), GPUS_PER_PAGE):
            for name in FOLLOWS[page.question]:
                yield replace(page, question=name, gpus=tuple(gpus[start : start + GPUS_PER_PAGE]))

    def _miss(self, page: Page, reason: str) -> None:
        self.problems.setdefault(ASKED[page.question].what, []).append((page, reason))

    def facts(self, begin: int, end: int) -> FleetFacts:
        return FleetFacts(
            begin_unix_seconds=begin,
            end_unix_seconds=end,
            used=self._hours("used", "sharing"),
            lost=self._hours("lost"),
            culprits=self._hours("culprits"),
            utilization=self._hours("utilization"),
            runs=self._runs(),
            rank_hours_without_gpu=self._hours("without_gpu").total,
            problems=tuple(self._sentences()),
        )

    def _hours(self, *names: str) -> Figures:
        """Steps as hours, of questions that are added up."""
        rows: Rows = {}
        for name in names:
            for key, value in self.rows[name].items():
                rows[key] = rows.get(key, 0.0) + value * self._step_seconds / HOUR_SECONDS
        return Figures.of(ASKED[names[0]].labels, {key: max(0.0, value) for key, value in rows.items()})

    def _runs(self) -> dict[RunKey, RunFacts]:
        infos: dict[RunKey, dict[tuple[str, ...], float]] = {}
        for (cluster, namespace, run, *labels), steps in self.rows["info"].items():
            infos.setdefault((cluster, namespace, run), {})[tuple(labels)] = steps
        devices = {key[:3]: key[3] for key in self.rows["lone_device"]}
        for cluster, namespace, run in (key[:3] for name in ("used", "mfu") for key in self.rows[name]):
            infos.setdefault((cluster, namespace, run), {})
        return {
            key: RunFacts(
                program=_program(labels),
                hours=sum(labels.values()) * self._step_seconds / HOUR_SECONDS,
                mfu_ratio=self._mean("mfu", "mfu_steps", key),
                mfu_target_ratio=self.rows["target"].get(key),
                utilization_ratio=self._mean("lone_utilization", "lone_steps", key),
                memory_bytes=self.rows["lone_memory"].get(key),
                memory_total_bytes=self.rows["lone_total"].get(key),
                device=devices.get(key, ""),
            )
            for key, labels in infos.items()
        }

    def _mean(self, total: str, steps: str, key: RunKey) -> float | None:
        count = self.rows[steps].get(key, 0.0)
        return self.rows[total].get(key, 0.0) / count if count else None

    def _sentences(self) -> Iterator[str]:
        for what, missed in self.problems.items():
            spans = [f"{moment(page.begin)} to {moment(page.end)}" for page, _ in missed]
            more = f" and {len(spans) - MAX_PROBLEMS} more times" if len(spans) > MAX_PROBLEMS else ""
            yield f"{what}: nothing from {', '.join(spans[:MAX_PROBLEMS])}{more} ({missed[0][1]})"


def _program(infos: Rows) -> Program:
    """Of a run that was restarted with another program, the one that it had longest."""
    if not infos:
        return Program()
    world_size, team, user, image, command = max(infos, key=lambda labels: (infos[labels], labels))
    is_number = world_size.isascii() and world_size.isdecimal() and len(world_size) < 10
    return Program(team, user, image, command, int(world_size) if is_number else None)


def _literal(text: str) -> str:
    """As part of a regular expression of Go."""
    return re.sub(r"([^\w\s-])", r"\\\1", text, flags=re.ASCII) if text.isascii() else "-"
