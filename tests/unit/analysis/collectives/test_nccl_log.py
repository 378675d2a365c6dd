"""NCCL's log: files of an H200 with NCCL 2.28, and lines of other versions and networks."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankscope.analysis.collectives.nccl_log import MAX_NAMES, MAX_WARNINGS, NO_DEVICE, NcclLog
from rankscope.analysis.verdicts.network import NcclFacts

FILES = Path(__file__).parents[3] / "data" / "nccl"
PREFIX = "trainer:20:289 [0] NCCL INFO "


def facts_of(*texts: str, prefix: str = PREFIX) -> NcclFacts:
    log = NcclLog()
    log.add(prefix + text for text in texts)
    return log.facts


def facts_in(name: str) -> NcclFacts:
    log = NcclLog()
    log.add((FILES / name).read_text().splitlines())
    return log.facts


def test_a_real_log_over_sockets() -> None:
    assert facts_in("sockets.log") == NcclFacts(
        version="2.28.9",
        network="Socket",
        devices=("lo",),
        transports=("NET/Socket",),
        no_infiniband="NCCL_IB_DISABLE=1",
        nodes=4,
        ranks=4,
        channels=2,
        rings=("0 1 2 3",),
    )


def test_a_real_log_with_operations_has_algorithms() -> None:
    facts = facts_in("collectives.log")
    assert facts.algorithms == ("RING/LL", "RING/SIMPLE") and facts.no_infiniband == NO_DEVICE


def test_a_real_log_of_a_failed_start_has_its_warning() -> None:
    facts = facts_in("duplicate_gpu.log")
    assert facts.warnings == ("Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 60",)
    assert (facts.ranks, facts.transports, facts.devices) == (None, (), ("eth0",))


def test_infiniband_with_its_devices_and_gdrdma() -> None:
    facts = facts_of(
        "NET/Socket : Using [0]ib0:192.0.2.1<0>",  # old versions list them before they choose
        "NET/IB : Using [0]mlx5_8:1/IB [1]mlx5_16:1/RoCE [2]mlx5_9:1/IB/SHARP [RO]; OOB ib0:192.0.2.1<0>",
        "Using network IB",
        "Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA",
        "Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM/read",
        "Channel 02 : 1[1] -> 2[2] via P2P/direct pointer",
        "Channel 03/0 : 1[1] -> 2[2] via SHM/direct/direct",
        "Channel 04/0 : 8[0] -> 0[0] [receive] via NET/IB/1(3)/GDRDMA/Shared",
        "Connected NVLS tree",
    )
    assert (facts.network, facts.devices, facts.no_infiniband) == ("IB", ("mlx5_8", "mlx5_16", "mlx5_9"), "")
    assert facts.transports == ("NET/IB/GDRDMA", "NVLS", "P2P/CUMEM", "P2P/direct", "SHM")


def test_ports_that_nccl_joins_are_both_used() -> None:
    facts = facts_of("NET/IB : Using [0]mlx5_0+mlx5_1:1/IB [RO]; OOB eth0:192.0.2.1<0>", "Using network IB")
    assert facts.devices == ("mlx5_0", "mlx5_1")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("NET/IB : No device found.", NO_DEVICE),
        ("NCCL_IB_DISABLE set by environment to 1.", "NCCL_IB_DISABLE=1"),
        ("NCCL_IB_DISABLE set by environment to 0.", ""),
        ("NCCL_NET set by environment to Socket", "NCCL_NET=Socket"),
    ],
)
def test_why_sockets_are_used(line: str, reason: str) -> None:
    assert facts_of(line, "Using network Socket").no_infiniband == reason
    assert facts_of(line, "Using network IB").no_infiniband == ""


def test_facts_are_those_of_the_largest_communicator() -> None:
    facts = facts_of(
        "comm 0x55aa rank 3 nRanks 64 nNodes 8 localRanks 8 localRank 3 MNNVL 0",
        "24 coll channels, 24 collnet channels, 16 nvls channels, 32 p2p channels, 2 p2p channels per peer",
        "comm 0x55ab rank 3 nRanks 8 nNodes 1 localRanks 8 localRank 3 MNNVL 0",
        "16 coll channels, 0 collnet channels, 16 nvls channels, 32 p2p channels, 32 p2p channels per peer",
    )
    assert (facts.ranks, facts.nodes, facts.channels) == (64, 8, 24)


def test_numbers_of_older_versions_are_algorithms() -> None:
    facts = facts_of("AllReduce: 288 Bytes -> Algo 1 proto 2 time 12.5", "Reduce: 1 Bytes -> Algo 00099 proto 7 time 1")
    assert facts.algorithms == ("00099/7", "RING/SIMPLE")


def test_lines_in_other_output_and_of_rccl_are_read() -> None:
    log = NcclLog()
    log.add(
        ["step 3 loss 0.1", "worker-0: RCCL version 2.22.3+hip6.3", "w: host:1:2 [0] NCCL INFO Using network IBext_v8"]
    )
    assert (log.facts.version, log.facts.network, log.lines) == ("2.22.3", "IBext_v8", 2)


def test_a_file_without_lines_of_nccl_has_none() -> None:
    log = NcclLog()
    log.add(["", "NCCL", "step 1", "\x00" * 100])
    assert log.lines == 0 and log.facts == NcclFacts()


def test_a_hostile_log_is_bounded_and_printable() -> None:
    many = [f"Channel 0/0 : 0[0] -> 1[0] via NET/Plugin{n:x}{'z' * 200}" for n in range(1000)]
    devices = "NET/Socket : Using " + " ".join(f"[{n}]eth{n}:192.0.2.1<0>" for n in range(1000))
    log = NcclLog()
    log.add([PREFIX + text for text in (*many, devices, "Using network Socket", "Channel 0/9 : " + "1 " * 9999)])
    log.add(f"t:1:2 [0] NCCL WARN \x1b[31m{number}" for number in range(1000))
    facts = log.facts
    assert len(facts.transports) <= MAX_NAMES and len(facts.devices) <= MAX_NAMES
    assert len(facts.warnings) == MAX_WARNINGS and all(warning.isprintable() for warning in facts.warnings)
