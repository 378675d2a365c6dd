"""Bytes, algorithm bandwidth and bus bandwidth of collectives, by the conventions of nccl-tests.

A collective's size is that of the whole array: the result of an all-gather, the input of one rank of a
reduce-scatter. Bus bandwidth multiplies it by what a link carries per byte, so that it can be compared with the
hardware for any number of ranks."""

from __future__ import annotations

import numpy as np

from rankscope.analysis.collectives.kinds import CollectiveKind
from rankscope.analysis.stats.robust import Floats, Ints

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
