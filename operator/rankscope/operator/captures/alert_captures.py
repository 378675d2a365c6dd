"""Captures requested by alerts: each becomes a Capture object, which is handled like any other."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

from rankscope.operator.alerts.alert import RefusedError, Wanted
from rankscope.operator.alerts.decision import FailedError
from rankscope.operator.captures import automatic as rules
from rankscope.operator.captures.automatic import AutomaticCaptureMaker
from rankscope.operator.kube.api_client import ApiError, ConflictError, Document, UnreachableError
from rankscope.operator.kube.leader_election import ShardLeases
from rankscope.operator.runs.controller import RunsController

STEPS = 3
# Alerts have no policy with a cooldown; captures of policies count too.
REST_SECONDS = 600.0
KEPT_SECONDS = 7 * 86400


class AlertCaptures:
    """`start` and `is_elsewhere` may be called from any thread."""

    def __init__(
        self,
        runs: RunsController,
        captures: AutomaticCaptureMaker,
        leases: ShardLeases,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._runs = runs
        self._captures = captures
        self._leases = leases
        self._clock = clock

    def is_elsewhere(self, job: str) -> bool:
        namespace, _, name = job.partition("#")[0].partition("/")
        return self._runs.object_of(namespace, name) is not None and not self._leases.holds(f"{namespace}/{name}")

    def start(self, wanted: Wanted) -> str:
        """The Capture's name. The same firing has the same name, also after a restart."""
        run_job, _, number = wanted.job.partition("#")
        namespace, _, run_name = run_job.partition("/")
        run = self._runs.object_of(namespace, run_name)
        if run is None or run.deleting:
            raise FailedError("the run has no TrainingRun yet")
        if not self._leases.holds(run_job):
            raise FailedError("another replica has this job")
        digest = hashlib.sha256(f"{run.uid} {wanted.occasion}".encode()).hexdigest()[:10]
        name = f"{run.name[:200]}-alert-{digest}"
        finding = f"{wanted.reason} {','.join(map(str, sorted(wanted.accused)))}" + (f" job {number}" if number else "")
        now = self._clock()
        for capture in self._captures.known():
            if capture.namespace != namespace or capture.spec is None or capture.spec.run != run_name:
                continue
            if capture.name == name:
                return name
            if not capture.is_finished and not capture.deleting:
                raise RefusedError(f"capture {capture.name} of the run is under way")
            is_recent = now - capture.created_unix_seconds < REST_SECONDS
            asked_for = set(map(str, wanted.accused)) - set(capture.spec.ranks.split(","))
            if is_recent and rules.is_automatic(capture) and not asked_for and capture.job == wanted.job:
                raise RefusedError(f"capture {capture.name} of these ranks was made recently")
        spec: Document = {
            "run": run_name,
            "ranks": ",".join(map(str, wanted.ranks)),
            "ttlSecondsAfterFinished": KEPT_SECONDS,
            "reason": wanted.reason[:1024],
        }
        spec |= {"steps": STEPS} if wanted.steps_are_known else {"seconds": rules.SECONDS}
        spec |= rules.job_number(wanted.job)
        annotations = {rules.TRIGGER: rules.BY_ALERT, rules.FINDING: finding[:1024]}
        body = rules.capture_document(name, run, spec, annotations)
        try:
            self._captures.create(run, body, rules.Past(now, finding))
        except ConflictError:
            return name
        except UnreachableError as error:
            raise FailedError(str(error)) from error
        except ApiError as error:
            raise RefusedError(str(error)) from error
        return name
