from __future__ import annotations

import numpy as np
import pytest

from rankscope.analysis.collective_kinds import (
    CollectiveKind,
    algorithm_gbps,
    bus_factor,
    bus_gbps,
    element_bytes,
    size_bytes,
)


def one(value: int) -> np.ndarray:
    return np.array([value])


def test_gives_the_golden_bandwidths_to_the_digit() -> None:
    size, duration = one(17179869184), one(61974 * 1000)
    assert f"{algorithm_gbps(size, duration)[0]:.4f}" == "277.2109"
    assert f"{bus_gbps(one(CollectiveKind.ALL_REDUCE), size, duration, one(8))[0]:.4f}" == "485.1191"


@pytest.mark.parametrize(
    ("kind", "factor"),
    [
        (CollectiveKind.ALL_REDUCE, 2 * 7 / 8),
        (CollectiveKind.ALL_GATHER, 7 / 8),
        (CollectiveKind.REDUCE_SCATTER, 7 / 8),
        (CollectiveKind.ALL_TO_ALL, 7 / 8),
        (CollectiveKind.BROADCAST, 1.0),
        (CollectiveKind.REDUCE, 1.0),
        (CollectiveKind.SEND, 1.0),
    ],
)
def test_follows_the_factors_of_nccl_tests(kind: CollectiveKind, factor: float) -> None:
    assert bus_factor(one(kind), one(8))[0] == factor


def test_barriers_unknown_groups_and_instants_have_no_bus_bandwidth() -> None:
    assert np.isnan(bus_factor(one(CollectiveKind.BARRIER), one(8))[0])
    assert np.isnan(bus_factor(one(CollectiveKind.ALL_REDUCE), one(-1))[0])
    assert np.isnan(algorithm_gbps(one(8), one(0))[0]) and np.isnan(algorithm_gbps(one(-1), one(5))[0])
    assert bus_gbps(one(CollectiveKind.ALL_REDUCE), one(8), one(4), one(1))[0] == 0.0


@pytest.mark.parametrize(
    ("kind", "put_in", "got_out", "ranks", "size"),
    [
        (CollectiveKind.ALL_REDUCE, 100, 100, 8, 100),
        (CollectiveKind.ALL_GATHER, 100, 800, 8, 800),
        (CollectiveKind.ALL_GATHER, 100, -1, 8, 800),
        (CollectiveKind.ALL_GATHER, 100, -1, -1, -1),
        (CollectiveKind.REDUCE_SCATTER, 800, 100, 8, 800),
        (CollectiveKind.REDUCE_SCATTER, -1, 100, 8, 800),
        (CollectiveKind.ALL_TO_ALL, 300, 500, 8, 500),
        (CollectiveKind.GATHER, 100, 0, 8, 800),
        (CollectiveKind.SEND, 100, -1, 8, 100),
        (CollectiveKind.BARRIER, -1, -1, 8, -1),
    ],
)
def test_counts_the_whole_array(kind: CollectiveKind, put_in: int, got_out: int, ranks: int, size: int) -> None:
    assert size_bytes(one(kind), one(put_in), one(got_out), one(ranks))[0] == size


@pytest.mark.parametrize(
    ("spelling", "size"),
    [
        *[("Float", 4), ("float", 4), ("torch.float32", 4), ("Int", 4), ("uint32_t", 4)],
        *[("c10::BFloat16", 2), ("BFloat16", 2), ("bf16", 2), ("half", 2), ("c10::Half", 2), ("Short", 2)],
        *[("signed char", 1), ("unsigned char", 1), ("Byte", 1), ("Float8_e4m3fn", 1), ("c10::Float8_e5m2", 1)],
        *[("long int", 8), ("long", 8), ("Long", 8), ("Double", 8), ("c10::complex<float>", 8)],
        *[("ComplexDouble", 16), ("bool", 1), ("mystery", None), ("", None)],
    ],
)
def test_knows_an_element_by_all_its_names(spelling: str, size: int | None) -> None:
    assert element_bytes(spelling) == size
