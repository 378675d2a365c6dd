"""Kinds of collectives, recognised by the names of kernels, annotations, operators and the profiler's metadata."""

from __future__ import annotations

import re
from enum import IntEnum

# Operations that transfer no data.
_NO_TRANSFER = ("wait", "init", "synchronize", "groupstart", "groupend", "startcoalescing", "endcoalescing")
_ANNOTATION = re.compile(r"^(nccl|rccl|gloo|mpi|ucc|xccl|ccl|hccl):(.+)", re.ASCII)
_PEER = re.compile(r":(?:send|recv) \d+(?:->|<-)(\d+)", re.ASCII)
_HOST_OPERATOR = re.compile(r"^(?:c10d|_c10d_functional)::", re.ASCII)


class CollectiveKind(IntEnum):
    """`label` is the name used in all output."""

    OTHER = 0  # unknown kind (NCCL's generic kernel without metadata)
    ALL_REDUCE = 1
    ALL_GATHER = 2
    REDUCE_SCATTER = 3
    ALL_TO_ALL = 4
    BROADCAST = 5
    REDUCE = 6
    GATHER = 7
    SCATTER = 8
    SEND = 9
    RECV = 10
    BARRIER = 11
    SEND_RECV = 12  # a kernel of point-to-point transfers with unknown calls
    COALESCED = 13  # one kernel for calls of several kinds

    @property
    def label(self) -> str:
        return self.name.lower()


# Compared after removing everything but letters. Longer words precede the words they contain.
_WORDS: tuple[tuple[str, CollectiveKind], ...] = (
    ("barrier", CollectiveKind.BARRIER),  # NCCL builds it from an all-reduce and may name it so
    ("allreduce", CollectiveKind.ALL_REDUCE),
    ("reducescatter", CollectiveKind.REDUCE_SCATTER),
    ("allgather", CollectiveKind.ALL_GATHER),
    ("alltoall", CollectiveKind.ALL_TO_ALL),
    ("broadcast", CollectiveKind.BROADCAST),
    ("sendrecv", CollectiveKind.SEND_RECV),
    ("coalesced", CollectiveKind.COALESCED),
    ("gather", CollectiveKind.GATHER),
    ("scatter", CollectiveKind.SCATTER),
    ("reduce", CollectiveKind.REDUCE),
    ("send", CollectiveKind.SEND),
    ("recv", CollectiveKind.RECV),
    ("receive", CollectiveKind.RECV),
)


def kind_of_kernel(name: str) -> CollectiveKind:
    """For example `ncclDevKernel_AllReduce_Sum_bf16_RING_LL(…)` and `ncclKernel_AllReduce_RING_LL_Sum_float(…)`."""
    return _kind(name.split("(")[0].split("<")[0]) or CollectiveKind.OTHER


def annotated_backend(name: str) -> str:
    """`nccl` for `nccl:all_reduce`; empty if the name is not an annotation of a collective."""
    match = _ANNOTATION.match(name)
    return match[1] if match and kind_of_note(match[2]) is not None else ""


def kind_of_annotation(name: str) -> CollectiveKind | None:
    match = _ANNOTATION.match(name)
    return kind_of_note(match[2]) if match else None


def annotated_peer(name: str) -> int | None:
    """1 for `nccl:send 0->1` and for `nccl:recv 0<-1`."""
    match = _PEER.search(name)
    return int(match[1]) if match else None


def kind_of_host_operator(name: str) -> CollectiveKind | None:
    """For example `c10d::allreduce_`, and the functional operators of compiled programs."""
    match = _HOST_OPERATOR.match(name)
    return kind_of_note(name[match.end() :]) if match else None


def kind_of_note(note: str) -> CollectiveKind | None:
    """For example `_allgather_base`, `ALLREDUCE`, `reduce_scatter_tensor_coalesced`, `send 0->1`; None if it is not
    a transfer."""
    letters = _letters(note)
    if not letters or letters.startswith(_NO_TRANSFER):
        return None
    return _kind(note)


def _kind(text: str) -> CollectiveKind | None:
    letters = _letters(text)
    for word, kind in _WORDS:
        if word in letters:
            return kind
    return None


def _letters(text: str) -> str:
    return re.sub(r"[^a-z]", "", text.lower())
