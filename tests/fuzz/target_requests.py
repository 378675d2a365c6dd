"""Requests of authorised callers: people who ask the operator for a capture, and holders of a certificate that a daemon
takes. Strings in them become names of objects, folders and ranks."""

from __future__ import annotations

import re

import msgspec
from google.protobuf.message import DecodeError

from rankscope.common.rank_selection import ChoiceError, Suspected, choose_ranks
from rankscope.daemon.captures import request as asking
from rankscope.daemon.captures.orders import CaptureError
from rankscope.daemon.server.policies import MAX_RUNS, BadPolicyError, PolicyBoard
from rankscope.operator.access import requests as people_asking
from rankscope.operator.access.guard import RefusedError
from rankscope.operator.kube.resources import CaptureSpec
from rankscope.v1.capture_service_pb2 import StartCaptureRequest
from rankscope.v1.policy_service_pb2 import ApplyPoliciesRequest
from tests.fuzz.checking import check_number, check_text, silence
from tests.fuzz.message_mutating import MessageMutator
from tests.fuzz.mutating import Mutator

_NOW = 1_790_000_000.0
_START = StartCaptureRequest(
    job="team/pytorchjob-train", ranks="0,3-5", steps=3, reason="slow", patience_seconds=30.0, id="c-1"
)
_APPLY = ApplyPoliciesRequest(lease_seconds=60.0)
_APPLY.policies.add(run="team/train", pods=["0a1b"], stack_rate_hertz=5.0, duty_cycle_steps=3, duty_cycle_seconds=600.0)
SEEDS = [_START.SerializeToString(), _APPLY.SerializeToString()]
_WORDS = (
    *(
        "team/pytorchjob-train",
        "team/x#2",
        "team/",
        "../x",
        "all",
        "straggler",
        "straggler+peer",
        "0,3-5",
        "5-3",
        "0-9999999",
    ),
    *(
        "9" * 5000 + "-" + "9" * 5000,
        "0-1," * 900 + "0",
        "²-³",
        "c-1",
        "C",
        "-",
        "a" * 64,
        "team/x#0",
        "team/x#²",
        "\n0",
    ),
)
_NAME = re.compile(r"[a-z0-9][-a-z0-9.]*")
WORLD_SIZE = 10_000_000  # the most that a process may claim


def run(data: bytes) -> None:
    try:
        request = StartCaptureRequest.FromString(data)
    except DecodeError:
        request = StartCaptureRequest()
    _check_operator(request)
    _check_daemon(request)
    _check_policies(data)


def _check_operator(request: StartCaptureRequest) -> None:
    for read in (people_asking.place_of_capture, people_asking.place_of_run, people_asking.places_to_list):
        try:
            place = read(request.job)
        except RefusedError as error:
            assert len(str(error)) < 1000
            continue
        assert not place.name or (_NAME.fullmatch(place.name) and len(place.name) <= 253)
        assert not place.namespace or (_NAME.fullmatch(place.namespace) and len(place.namespace) <= 63)
    try:
        name = people_asking.capture_name(request, _NOW)
        assert _NAME.fullmatch(name) and len(name) <= 63
        spec = people_asking.spec_document(request, people_asking.Place("team", "x"))
    except RefusedError as error:
        assert len(str(error)) < 1000, len(str(error))
        return
    msgspec.convert(spec, CaptureSpec)
    msgspec.json.encode(spec)


def _check_daemon(request: StartCaptureRequest) -> None:
    for read in (
        lambda: asking.id_of(request, _NOW),
        lambda: asking.length_of(request, {}, ()),
        lambda: asking.kept_verdict(request.verdict),
        lambda: asking.patience_of(request),
        lambda: asking.start_of(request, _NOW),
        lambda: asking.options_of(request),
    ):
        try:
            read()
        except CaptureError as error:
            assert len(str(error)) < 500
    check_text(asking.kept_text(request.reason), 512)
    try:
        ranks = choose_ranks(request.ranks, range(8), WORLD_SIZE, Suspected((1,), (0,)))
        assert ranks == sorted(set(ranks)) and all(0 <= rank < WORLD_SIZE for rank in ranks[:10])
    except ChoiceError as error:
        assert len(str(error)) < 500


def _check_policies(data: bytes) -> None:
    try:
        request = ApplyPoliciesRequest.FromString(data)
    except DecodeError:
        return
    board = PolicyBoard(10.0, lambda: 100.0)
    try:
        with silence():
            notes = board.apply(request)
    except BadPolicyError:
        return
    assert len(notes) <= 32 and all(len(note) < 500 for note in notes)
    held = board.held()
    assert len(held) <= MAX_RUNS
    for one in held:
        check_number(one.policy.stack_rate_hertz)
        assert 0 <= one.policy.stack_rate_hertz <= 100 and one.policy.duty_cycle_steps <= 100


class _Both:
    def __init__(self, plain: Mutator) -> None:
        self._random = plain.random
        self._kinds = [MessageMutator(plain, kind, _WORDS) for kind in (StartCaptureRequest, ApplyPoliciesRequest)]

    def mutate(self, data: bytes, other: bytes) -> bytes:
        return self._random.choice(self._kinds).mutate(data, other)


def mutator(plain: Mutator) -> _Both:
    return _Both(plain)
