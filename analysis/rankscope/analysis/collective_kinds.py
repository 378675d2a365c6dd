"""Kinds of collectives, recognised by the names of kernels, annotations, operators and the profiler's metadata; and
their bytes, algorithm bandwidth and bus bandwidth, by the conventions of nccl-tests.

A collective's size is that of the whole array: the result of an all-gather, the input of one rank of a
reduce-scatter. Bus bandwidth multiplies it by what a link carries per byte, so that it can be compared with the
hardware for any number of ranks."""

from __future__ import annotations

import re
from enum import IntEnum

import numpy as np

from rankscope.analysis.stats.robust import Floats, Ints

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


# All ranks leave these together: none is done before all have entered.
LEFT_TOGETHER = (
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.ALL_GATHER,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.ALL_TO_ALL,
    CollectiveKind.BARRIER,
)

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


_SPELLINGS: dict[int, tuple[str, ...]] = {
    1: (
        *("byte", "char", "int8", "uint8", "signed char", "unsigned char", "bool", "i8", "u8"),
        *("int8_t", "uint8_t", "quint8", "qint8", "qint4x2", "fp8", "f8e4m3", "f8e5m2"),
    ),
    2: (
        *("half", "float16", "f16", "fp16", "bfloat16", "bf16", "short", "short int", "int16", "uint16"),
        *("int16_t", "uint16_t", "unsigned short", "complexchar", "__half", "__nv_bfloat16"),
    ),
    4: (
        *("float", "float32", "f32", "fp32", "int", "int32", "uint32", "int32_t", "uint32_t", "unsigned int"),
        *("unsigned", "qint32", "complexhalf", "complex<half>", "u32", "i32", "tf32"),
    ),
    8: (
        *("double", "float64", "f64", "fp64", "long", "long int", "long long", "int64", "uint64", "int64_t"),
        *("uint64_t", "unsigned long", "complexfloat", "complex<float>", "complex64", "u64", "i64"),
        *("unsigned long long", "long long int"),
    ),
    16: ("complexdouble", "complex<double>", "complex128"),
}
_BYTES_BY_SPELLING = {spelling: size for size, spellings in _SPELLINGS.items() for spelling in spellings}
_PREFIXES = ("torch.", "c10::", "at::", "nccl", "std::")


def element_bytes(element_type: str) -> int | None:
    """Bytes of one element by the names that torch, NCCL and C++ use for its type; None if unknown."""
    word = " ".join(element_type.strip().lower().split())
    for prefix in _PREFIXES:
        word = word.removeprefix(prefix).replace(f"<{prefix}", "<")
    if word.startswith(("float8", "float4")):
        return 1  # float8_e4m3fn, float8_e5m2, … and float4_e2m1fn_x2, which packs two into a byte
    return _BYTES_BY_SPELLING.get(word)


def size_bytes(kind: Ints, in_bytes: Ints, out_bytes: Ints, group_size: Ints) -> Ints:
    """The size of each collective as nccl-tests counts it, from one rank's input and output; -1 if unknown. For an
    uneven all-to-all, the larger side."""
    ranks = np.where(group_size > 0, group_size, -1)
    gathered = np.where(out_bytes >= 0, out_bytes, np.where((in_bytes >= 0) & (ranks > 0), in_bytes * ranks, -1))
    scattered = np.where(in_bytes >= 0, in_bytes, np.where((out_bytes >= 0) & (ranks > 0), out_bytes * ranks, -1))
    # Only the root has the whole array; the other ranks know their part.
    of_root_out = np.where((in_bytes >= 0) & (ranks > 0), in_bytes * ranks, out_bytes)
    of_root_in = np.where((out_bytes >= 0) & (ranks > 0), out_bytes * ranks, in_bytes)
    whole = np.maximum(in_bytes, out_bytes)
    return np.select(
        [
            kind == CollectiveKind.ALL_GATHER,
            kind == CollectiveKind.REDUCE_SCATTER,
            kind == CollectiveKind.GATHER,
            kind == CollectiveKind.SCATTER,
        ],
        [gathered, scattered, of_root_out, of_root_in],
        whole,
    )


def bus_factor(kind: Ints, group_size: Ints) -> Floats:
    """Bus bandwidth over algorithm bandwidth; NaN if the group's size is unknown or the kind has no such factor."""
    ranks = np.where(group_size > 0, group_size, np.nan)
    share = (ranks - 1) / ranks
    one = np.ones_like(share)
    return np.select(
        [
            kind == CollectiveKind.ALL_REDUCE,
            np.isin(
                kind,
                [
                    CollectiveKind.ALL_GATHER,
                    CollectiveKind.REDUCE_SCATTER,
                    CollectiveKind.ALL_TO_ALL,
                    CollectiveKind.GATHER,
                    CollectiveKind.SCATTER,
                ],
            ),
            np.isin(kind, [CollectiveKind.BROADCAST, CollectiveKind.REDUCE, CollectiveKind.SEND, CollectiveKind.RECV]),
        ],
        [2 * share, share, one],
        np.nan,
    )


def algorithm_gbps(size: Ints, duration_ns: Ints) -> Floats:
    """GB/s (10⁹ bytes) of the array; NaN if size or duration is unknown."""
    known = (size >= 0) & (duration_ns > 0)
    return np.where(known, size / np.where(known, duration_ns, 1), np.nan)


def bus_gbps(kind: Ints, size: Ints, duration_ns: Ints, group_size: Ints) -> Floats:
    """GB/s over the busiest link; 0 for a group of one rank, which transfers nothing."""
    return algorithm_gbps(size, duration_ns) * bus_factor(kind, group_size)
