"""What a kernel, an annotation or the profiler's own note calls a collective, as one kind."""

from __future__ import annotations

import re
from enum import IntEnum


class CollectiveKind(IntEnum):
    """`label` is how it is written everywhere outside."""

    OTHER = 0  # communication of a kind that cannot be told (NCCL's generic kernel without a note)
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
    SEND_RECV = 12  # a kernel of point-to-point transfers whose calls are not known
    COALESCED = 13  # one kernel for calls of several kinds

    @property
    def label(self) -> str:
        return self.name.lower()


# After removing everything but letters. Longer words stand before the words they contain.
_WORDS: tuple[tuple[str, CollectiveKind], ...] = (
    ("barrier", CollectiveKind.BARRIER),  # NCCL's is built from an all-reduce, and may be called so
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
# What a host notes that moves no data.
_SILENT = ("wait", "init", "synchronize", "groupstart", "groupend", "startcoalescing", "endcoalescing")
_ANNOTATION = re.compile(r"^(nccl|rccl|gloo|mpi|ucc|xccl|ccl|hccl):(.+)", re.ASCII)
_PEER = re.compile(r":(?:send|recv) \d+(?:->|<-)(\d+)", re.ASCII)
_HOST_OPERATOR = re.compile(r"^(?:c10d|_c10d_functional)::", re.ASCII)


def kind_of_kernel(name: str) -> CollectiveKind:
    """`ncclDevKernel_AllReduce_Sum_bf16_RING_LL(…)` and `ncclKernel_AllReduce_RING_LL_Sum_float(…)` alike."""
    return _kind(name.split("(")[0].split("<")[0]) or CollectiveKind.OTHER


def annotated_backend(name: str) -> str:
    """`nccl` of `nccl:all_reduce`; empty where the name is no annotation of a collective."""
    match = _ANNOTATION.match(name)
    return match[1] if match and kind_of_note(match[2]) is not None else ""


def kind_of_annotation(name: str) -> CollectiveKind | None:
    match = _ANNOTATION.match(name)
    return kind_of_note(match[2]) if match else None


def annotated_peer(name: str) -> int | None:
    """1 of `nccl:send 0->1` and of `nccl:recv 0<-1`."""
    match = _PEER.search(name)
    return int(match[1]) if match else None


def kind_of_host_operator(name: str) -> CollectiveKind | None:
    """`c10d::allreduce_` and the functional ones of compiled programs."""
    match = _HOST_OPERATOR.match(name)
    return kind_of_note(name[match.end() :]) if match else None


def kind_of_note(note: str) -> CollectiveKind | None:
    """`_allgather_base`, `ALLREDUCE`, `reduce_scatter_tensor_coalesced`, `send 0->1`; None for what is no transfer."""
    letters = _letters(note)
    if not letters or letters.startswith(_SILENT):
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
