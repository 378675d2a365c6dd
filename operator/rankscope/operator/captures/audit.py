"""The operator's audit records: who requested each Capture, how, and with what result."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import replace

from msgspec import UNSET, structs

from rankscope.common.audit import LOGGER, AuditRecord, Via, audit_line
from rankscope.common.token_bucket import KeyedTokenBuckets
from rankscope.operator.captures.automatic import BY_ALERT, BY_POLICY, POLICY, TRIGGER
from rankscope.operator.kube.objects import CaptureObject
from rankscope.operator.kube.resources import CaptureSpec, CaptureStatus

audit_log = logging.getLogger(LOGGER)

# How the capture was requested from Rankscope; set by Rankscope only.
VIA = "rankscope.dev/via"
BY_API = "api"
# The same record of the same caller is written again after this: one for every attempt would fill a disk.
REPEAT_SECONDS = 60.0
REFUSALS_AT_ONCE, REFUSALS_PER_SECOND = 60.0, 0.5
MAX_REMEMBERED = 4096


class CaptureAudit:
    """May be called from any thread. `names_are_stamped`: the webhooks guarantee that annotations are true."""

    def __init__(
        self,
        names_are_stamped: bool = False,
        unix_seconds: Callable[[], float] = time.time,
        monotonic_seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        self._names_are_stamped = names_are_stamped
        self._unix_seconds = unix_seconds
        self._monotonic_seconds = monotonic_seconds
        self._lock = threading.Lock()
        self._written: OrderedDict[Hashable, float] = OrderedDict()
        self._refusals = KeyedTokenBuckets(REFUSALS_AT_ONCE, REFUSALS_PER_SECOND, monotonic_seconds)  # by caller
        self._vouched: OrderedDict[str, None] = OrderedDict()  # uids of objects of authenticated callers

    def write(self, record: AuditRecord) -> None:
        audit_log.info("%s", audit_line(record, self._unix_seconds()))

    def refused(self, record: AuditRecord) -> None:
        """A caller's refusals are limited: each may name something else, and fill the log."""
        record = replace(record, event="refused")
        if not self._is_news_of_the_minute(record):
            return
        if self._refusals.take(record.user or record.address):
            self.write(record)
        else:
            text = "more refusals of this caller are not recorded"
            who = AuditRecord("refused", record.via, record.user, record.groups, record.verified, record.address)
            self.write_once_a_minute(replace(who, result="TooMany", message=text))

    def write_once_a_minute(self, record: AuditRecord) -> None:
        """The same of the same caller at most once a minute."""
        if self._is_news_of_the_minute(record):
            self.write(record)

    def vouch_for(self, uid: str) -> None:
        with self._lock:
            self._vouched[uid] = None
            while len(self._vouched) > MAX_REMEMBERED:
                self._vouched.popitem(last=False)

    def asked(self, thing: CaptureObject) -> None:
        """Of an object that the API server has: reviews at the webhook prove nothing, because anybody may send them.
        Called before the first write of the status, which tells the next operator that the record exists. Requests of
        users and our own decisions are recorded where they are made."""
        if via_of(thing) == "kubectl" and thing.status.phase is UNSET:
            self._once(thing, replace(self._record(thing, thing.status), event="asked"))

    def begun(self, thing: CaptureObject) -> None:
        """Called before a daemon is asked to record. Another start, as a status may ask for it, is another record."""
        self._once(thing, self._record(thing, thing.status), thing.status.start_unix_ms)

    def ended(self, thing: CaptureObject, status: CaptureStatus, result: str = "") -> None:
        """Called before the object is written: after a crash in between the record is written twice, but never
        missing."""
        record = self._record(thing, status)
        message = status.message if isinstance(status.message, str) else ""
        delivered = status.delivered if isinstance(status.delivered, str) else ""
        said = result or str(status.phase)
        text = "; ".join(part for part in (f"{delivered} ranks delivered" if delivered else "", message) if part)
        self._once(thing, replace(record, event="ended", result=said, message=text))

    def _once(self, thing: CaptureObject, record: AuditRecord, occasion: Hashable = None) -> None:
        if self._is_news((thing.uid, record.event, occasion), 0.0, float("inf")):
            self.write(record)

    def _is_news_of_the_minute(self, record: AuditRecord) -> bool:
        what = (record.what, record.namespace, record.run, record.capture, record.id, record.ranks)
        who = (record.event, record.user, record.address, record.result, record.message)
        return self._is_news((*who, *what), self._monotonic_seconds(), REPEAT_SECONDS)

    def _is_news(self, key: Hashable, now: float, seconds: float) -> bool:
        with self._lock:
            said = self._written.get(key)
            if said is not None and now - said < seconds:
                return False
            self._written[key] = now
            self._written.move_to_end(key)
            while len(self._written) > MAX_REMEMBERED:
                self._written.popitem(last=False)
            return True

    def _record(self, thing: CaptureObject, status: CaptureStatus) -> AuditRecord:
        via = via_of(thing)
        with self._lock:
            verified = self._names_are_stamped or thing.uid in self._vouched
        user = thing.requested_by
        if via in (BY_POLICY, BY_ALERT):
            user = f"policy {thing.annotations[POLICY]}" if POLICY in thing.annotations else via
        chosen = ",".join(str(rank.rank) for rank in status.ranks)
        record = AuditRecord(
            event="begun",
            via=via,
            user=user,
            verified=verified and bool(user),
            namespace=thing.namespace,
            capture=thing.name,
            id=thing.capture_id,
        )
        if thing.spec is not None:
            record = asked_for(record, thing.spec)
        return replace(record, ranks=chosen or record.ranks)


def via_of(thing: CaptureObject) -> Via:
    trigger = thing.annotations.get(TRIGGER)
    if trigger == BY_POLICY:
        return "policy"
    if trigger == BY_ALERT:
        return "alert"
    return "api" if thing.annotations.get(VIA) == BY_API else "kubectl"


def asked_for(record: AuditRecord, spec: CaptureSpec) -> AuditRecord:
    """The record with the request."""
    return replace(
        record,
        run=spec.run,
        ranks=spec.ranks,
        steps=spec.steps if isinstance(spec.steps, int) else None,
        seconds=spec.seconds if isinstance(spec.seconds, float) else None,
        options=tuple(name for name, is_on in structs.asdict(spec.options).items() if is_on),
        reason=spec.reason if isinstance(spec.reason, str) else "",
    )
