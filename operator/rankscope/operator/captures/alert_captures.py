"""Captures requested by alerts: each becomes a Capture object, which is handled like any other."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable
from typing import Protocol

from rankscope.common.run_names import run_name
from rankscope.operator.alerts.alert import RefusedError, Wanted
from rankscope.operator.alerts.decision import FailedError
from rankscope.operator.captures import automatic as rules
from rankscope.operator.captures.automatic import CaptureMaker
from rankscope.operator.kube.api_client import ApiError, ConflictError, Document, UnreachableError
from rankscope.operator.kube.leader_election import Leases
from rankscope.operator.kube.objects import RunObject

# Alerts have no policy with a cooldown; captures of policies count too.
REST_SECONDS = 600.0
KEPT_SECONDS = 7 * 86400


class Runs(Protocol):
    def object_of(self, namespace: str, name: str) -> RunObject | None: ...


class AlertCaptures:
    """`start` and `is_elsewhere` may be called from any thread."""

    def __init__(
        self,
        runs: Runs,
        captures: CaptureMaker,
        leases: Leases,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._runs = runs
        self._captures = captures
        self._leases = leases
        self._clock = clock

    def is_elsewhere(self, job: str) -> bool:
        namespace, name, _ = rules.run_and_number(job)
        return self._runs.object_of(namespace, name) is not None and not self._leases.holds(run_name(namespace, name))

    def start(self, wanted: Wanted) -> str:
        """The Capture's name. The same firing has the same name, also after a restart."""
        namespace, run_part, number = rules.run_and_number(wanted.job)
        run = self._runs.object_of(namespace, run_part)
        if run is None or run.deleting:
            raise FailedError("the run has no TrainingRun yet")
        if not self._leases.holds(run.place):
            raise FailedError("another replica has this job")
        digest = hashlib.sha256(f"{run.uid} {wanted.occasion}".encode()).hexdigest()[:10]
        # Outside Kubernetes a run's name may have characters that a capture's name has not.
        prefix = re.sub("[^a-z0-9.-]+", "-", run.name[:200].lower()).strip("-.")
        name = f"{prefix or 'run'}-alert-{digest}"
        finding = f"{wanted.reason} {','.join(map(str, sorted(wanted.accused)))}" + (f" job {number}" if number else "")
        now = self._clock()
        for capture in self._captures.known():
            if capture.namespace != namespace or capture.spec is None or capture.spec.run != run.name:
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
            "run": run.name,
            "ranks": ",".join(map(str, wanted.ranks)),
            "ttlSecondsAfterFinished": KEPT_SECONDS,
            "reason": wanted.reason[:1024],
        }
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
