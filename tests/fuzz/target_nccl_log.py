"""NCCL's debug file, which the training process may forge, in parts as it grows."""

from __future__ import annotations

from dataclasses import astuple

from rankscope.analysis.collectives.nccl_log import MAX_NAMES, NcclLog
from rankscope.operator.correlation.node_networks import network_of
from rankscope.v1.window_pb2 import NcclLog as NcclLogMessage
from rankscope.v1.window_pb2 import NodeNetwork
from tests.shared_data import ROOT

SEEDS = [path.read_bytes() for path in sorted((ROOT / "tests/data/nccl").glob("*.log"))]
TOKENS = [
    *(b"NCCL INFO ", b"NCCL WARN ", b"NET/IB : Using [0]mlx5_0+mlx5_1:1/IB", b" via NET/IB/0(1)/GDRDMA/Shared", b"\0"),
    *(b"NET/Socket : Using [0]eth0:192.0.2.1<0>", b"Using network ", b"Bytes -> Algo 99999 proto 00009 ", b"\x1b[31m"),
    *(
        b"comm 0x1 rank 0 nRanks 99999999 nNodes 99999999 ",
        b"99999 coll channels,",
        b"Channel 00/02 : 0 1 2 3",
        b"\n\n",
    ),
]


def run(data: bytes) -> None:
    log = NcclLog()
    middle = len(data) // 2
    for part in (data[:middle], data[middle:]):
        log.add(part.decode("utf-8", "replace").split("\n"))
    facts = log.facts
    for value in astuple(facts):
        for text in value if isinstance(value, tuple) else [value]:
            assert not isinstance(text, str) or (text.isprintable() and len(text) <= 200)
        assert not isinstance(value, tuple) or len(value) <= MAX_NAMES
    sent = {name: getattr(facts, name) for name in NcclLogMessage.DESCRIPTOR.fields_by_name}
    network = network_of(NodeNetwork(nccl=NcclLogMessage(**sent)))
    assert network.nccl is not None and network.nccl.devices == facts.devices
