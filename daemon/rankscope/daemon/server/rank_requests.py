"""Requests of the daemon's services about a run and its ranks: checked, and refused with a reason."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NoReturn, Protocol

import grpc

from rankscope.daemon.samples import MAX_RANK, RankProcess
from rankscope.daemon.server.grpc_server import abort

# A request has at most 64 KiB.
NAME_CHARACTERS: Final = 512
MAX_RANKS: Final = 16384
MAX_NAMES: Final = 1024  # threads, phases and pods
QUEUE_SECONDS: Final = 5.0


class RequestError(Exception):
    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class RanksRequest(Protocol):
    @property
    def job(self) -> str: ...
    @property
    def ranks(self) -> Collection[int]: ...
    @property
    def pods(self) -> Collection[str]: ...


@contextmanager
def refusing(context: grpc.ServicerContext) -> Iterator[None]:
    try:
        yield
    except RequestError as error:
        abort(context, error.code, str(error))


@contextmanager
def turn(places: threading.Semaphore, taken: str) -> Iterator[None]:
    if not places.acquire(timeout=QUEUE_SECONDS):
        raise RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{taken}; try again in a few seconds")
    try:
        yield
    finally:
        places.release()


def check_names(job: str, ranks: Collection[int], *names: Collection[str]) -> None:
    def refuse(text: str) -> NoReturn:
        raise RequestError(grpc.StatusCode.INVALID_ARGUMENT, text)

    if not job:
        refuse("name the run; `rankscope top` lists them")
    if len(ranks) > MAX_RANKS or any(rank >= MAX_RANK for rank in ranks):
        refuse(f"ranks: up to {MAX_RANKS} numbers below {MAX_RANK} can be named")
    if any(len(group) > MAX_NAMES for group in names):
        refuse(f"up to {MAX_NAMES} names of a kind can be given")
    if any(len(name) > NAME_CHARACTERS for name in (job, *(name for group in names for name in group))):
        refuse(f"a name has more than {NAME_CHARACTERS} characters")


def ranks_of(request: RanksRequest, ranks: Sequence[RankProcess]) -> list[RankProcess]:
    """The ranks that a request names, of those that run here."""
    pods, wanted = frozenset(request.pods), frozenset(request.ranks)
    return [
        rank
        for rank in ranks
        if (not wanted or rank.rank in wanted)
        and (not pods or rank.pod in pods)
        # A pod says enough while the operator has not named its run.
        and (rank.job == request.job or (bool(pods) and "/" not in rank.job))
    ]
