"""Sends the names of runs and the sampling rates of policies to the daemons that have pods of the runs: after a change,
again to a daemon that was away, and, as rates hold on lease, when half of the lease has passed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc

from rankscope.common.text import one_line
from rankscope.v1.policy_service_pb2 import ApplyPoliciesRequest, ApplyPoliciesResponse, RunPolicy
from rankscope.v1.policy_service_pb2_grpc import PolicyServiceStub

log = logging.getLogger(__name__)

# Long enough for a restart of the operator, short enough that daemons without one soon return to their own settings.
LEASE_SECONDS = 300.0
NAMES_SECONDS = 3600.0
CALL_SECONDS = 10.0
RETRY_SECONDS = 15.0
WORKERS = 8
# In one call: a daemon reads at most 64 KiB.
RUNS_AT_ONCE = 100

Wanted = Mapping[str, Mapping[str, RunPolicy]]  # by node and run


@dataclass(frozen=True)
class _Sent:
    policy: RunPolicy
    at_seconds: float


class PolicyPusher:
    """`follow` is called every few seconds, in one thread; the calls are made in others, one at a time to a daemon.
    `report` gets a run and a note of what a daemon did not accept."""

    def __init__(
        self,
        channel: Callable[[str], grpc.Channel],
        report: Callable[[str, str], None],
        monotonic_seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channel = channel
        self._report = report
        self._monotonic_seconds = monotonic_seconds
        self._lock = threading.Lock()
        self._sent: dict[str, dict[str, _Sent]] = {}  # node, run
        self._connected: Mapping[str, int] = {}
        self._busy: set[str] = set()
        self._not_before: dict[str, float] = {}
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="rankscope-policies")

    def stop(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def forget_interrupted(self, connected: Mapping[str, int]) -> None:
        """A daemon that was away may have forgotten everything. `connected` are the numbers of the connections by
        node."""
        with self._lock:
            known, self._connected = self._connected, connected
            for node in [node for node, number in known.items() if connected.get(node) != number]:
                self._sent.pop(node, None)
                self._not_before.pop(node, None)

    def follow(
        self,
        wanted: Wanted,
        addresses: Mapping[str, str],
        connected: Set[str],
        holds: Callable[[str], bool],
    ) -> None:
        """`connected` are the nodes with a connected daemon. Runs that are not held belong to another replica."""
        now = self._monotonic_seconds()
        with self._lock:
            for node in (wanted.keys() | self._sent.keys()) & connected & addresses.keys():
                for run in [run for run in self._sent.get(node, ()) if not holds(run)]:
                    del self._sent[node][run]
                due = self._due(node, wanted.get(node, {}), now)
                if due and node not in self._busy and self._not_before.get(node, 0.0) <= now:
                    self._busy.add(node)
                    self._pool.submit(self._push, node, addresses[node], due[:RUNS_AT_ONCE])

    def _due(self, node: str, wanted: Mapping[str, RunPolicy], now: float) -> list[RunPolicy]:
        sent = self._sent.get(node, {})
        due = [
            policy
            for run, policy in wanted.items()
            if run not in sent or sent[run].policy != policy or now - sent[run].at_seconds > _renewal_seconds(policy)
        ]
        return [*due, *(RunPolicy(run=run) for run in sent if run not in wanted)]

    def _push(self, node: str, address: str, policies: list[RunPolicy]) -> None:
        request = ApplyPoliciesRequest(policies=policies, lease_seconds=LEASE_SECONDS)
        before = self._monotonic_seconds()
        try:
            with self._channel(address) as channel:
                answer: ApplyPoliciesResponse = PolicyServiceStub(channel).ApplyPolicies(request, timeout=CALL_SECONDS)
        except Exception as error:  # noqa: BLE001 - one daemon must not keep the others from getting theirs
            text = (error.details() or error.code().name) if isinstance(error, grpc.RpcError) else str(error)
            log.info(
                "names and policies cannot be sent to %s, trying again in %.0f s: %s",
                node,
                RETRY_SECONDS,
                one_line(text, 200),
            )
            with self._lock:
                self._busy.discard(node)
                self._not_before[node] = self._monotonic_seconds() + RETRY_SECONDS
            return
        with self._lock:
            sent = self._sent.setdefault(node, {})
            for policy in policies:
                if policy.pods:
                    sent[policy.run] = _Sent(policy, before)
                else:
                    sent.pop(policy.run, None)
            self._busy.discard(node)
        for note in answer.notes[:32]:
            run = next((policy.run for policy in policies if note.startswith(f"{policy.run[:128]}: ")), "")
            if run:
                self._report(run, f"{node}: {note[:500]}")


def _renewal_seconds(policy: RunPolicy) -> float:
    """Names alone have no lease: most runs have no rates of their own, and a fleet has thousands of nodes."""
    has_rates = policy.HasField("stack_rate_hertz") or policy.HasField("duty_cycle_steps")
    return LEASE_SECONDS / 2 if has_rates else NAMES_SECONDS
