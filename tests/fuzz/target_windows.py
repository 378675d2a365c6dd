"""What a daemon sends: a stolen certificate or a hostile node may say anything. It must not reach the ranks
of other nodes, and must not end the thread that judges all jobs."""

from __future__ import annotations

import struct
import warnings

import msgspec
import numpy as np
from google.protobuf.message import DecodeError

from benchmarks.fleets import response
from rankscope.analysis.verdicts.network import MAX_PORTS, NetworkPort, NodeNetwork
from rankscope.analysis.verdicts.network_causes import network_evidence
from rankscope.analysis.verdicts.thresholds import DEFAULT_POLICY
from rankscope.analysis.verdicts.window_columns import FIGURES, columns
from rankscope.operator.correlation.correlator import Correlator, LostSeconds
from rankscope.operator.correlation.daemon_windows import DaemonMessage, HeldWindow
from rankscope.operator.correlation.job_service import job_status, verdict_of
from rankscope.operator.correlation.node_networks import network_of
from rankscope.operator.kube.resources import TrainingRunStatus
from rankscope.operator.metrics import Exporter
from rankscope.operator.runs.inventory import Inventory
from rankscope.operator.runs.pods import Pod
from rankscope.operator.runs.rank_binding import Binding
from rankscope.operator.runs.status import run_status
from rankscope.v1 import window_pb2
from rankscope.v1.rank_service_pb2 import WatchRanksResponse
from tests.fuzz.checking import check_metrics, check_number
from tests.fuzz.message_mutating import FLOATS, MessageMutator
from tests.fuzz.mutating import Mutator
from tests.fuzz.targets import recorded


def _with_network(data: bytes) -> bytes:
    message = WatchRanksResponse.FromString(data)
    ports = [
        window_pb2.NetworkPort(device="mlx5_0", port=1, link="infiniband", is_up=True, rate_bits_per_second=2e11),
        window_pb2.NetworkPort(device="eth0", link="ethernet", transmitted_bytes=10**9, received_bytes=10**9),
    ]
    for port in ports:
        port.events.update({"symbol": 400, "link_down": 1})
        port.usual_events.update({"symbol": 2.0})
    nccl = window_pb2.NcclLog(network="Socket", devices=["eth0"], no_infiniband="NCCL_IB_DISABLE=1", nodes=2, ranks=2)
    network = window_pb2.NodeNetwork(ports=ports, seconds=60, tcp_segments=9000, tcp_retransmits=900, nccl=nccl)
    message.windows[0].network.CopyFrom(network)
    return message.SerializeToString()


SEEDS = [*recorded("windows"), *map(_with_network, recorded("windows"))]
NODE, OTHER_NODE = "node-a", "node-b"
UIDS = ("0a1b2c3d-1111-2222-3333-444455556666", "0a1b2c3d-1111-2222-3333-444455557777")
_WORDS = (*UIDS, NODE, OTHER_NODE, "train", "forward", "backward", "input", "communication", "other", "steps", "stacks")
_LABELS = {"training.kubeflow.org/job-name": "train"}
CPU_SECONDS = 2.0


def run(data: bytes) -> None:
    try:
        message = DaemonMessage(NODE, data)
    except ValueError:
        return  # the stream is broken off
    inventory = Inventory()
    for uid, node in zip(UIDS, (NODE, OTHER_NODE), strict=True):
        inventory.changed(uid, Pod(uid, f"train-{node}", "team", node, labels=_LABELS))
    now = [1_790_000_000.0]
    binding = Binding(inventory, lambda: now[0])
    correlator = Correlator(clock=lambda: now[0])
    lost = LostSeconds()
    correlator.listen(lost)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of NaN and infinity, which daemons may send
        for _ in range(3):
            accepted = binding.bind([message])
            assert len(accepted.windows) <= len(message.windows)
            for window in accepted.windows:
                _check_window(window)
            correlator.take(accepted.windows, accepted.departed)
            correlator.tick()
            now[0] += 5.0
            correlator.tick()
        _check_states(correlator, lost, inventory, now[0], data)


def _check_window(held: HeldWindow) -> None:
    """It is the node's own, and its figures are such as rules can take, whatever was sent."""
    for identity in (held.identity, held.message().identity):
        assert identity.job.startswith("team/") and identity.node == NODE and identity.pod == UIDS[0]
    if (told := held.network()) is not None:
        _check_network(network_of(told))
    figures = columns([held.figures])
    assert figures.shape == (len(FIGURES), 1)
    assert (np.isnan(figures) | ((figures >= 0) & (figures <= 2.0**53))).all()


def _check_network(network: NodeNetwork) -> None:
    healthy = NodeNetwork((NetworkPort("mlx5_0", 1, "infiniband", True, 4e11),), 60.0, 50_000, 10)
    assert len(network.ports) <= MAX_PORTS
    found = network_evidence({"node-a": network, "node-b": healthy, "node-c": healthy}, DEFAULT_POLICY)
    assert found.isprintable() and len(found) < 1000


def _check_states(correlator: Correlator, lost: LostSeconds, inventory: Inventory, now: float, data: bytes) -> None:
    states = correlator.states
    exporter = Exporter(lambda: states, lost, lambda job: None, lambda job: 0)
    check_metrics(exporter.collect(), series=200 * max(1, len(states)), data=data)
    runs = inventory.runs()
    for state in states:
        for value in (state.step_seconds, state.mfu_ratio, state.exposed_communication_ratio):
            check_number(value)
        check_number(state.verdict.impact_ratio)
        check_number(state.verdict.lost_gpu_seconds)
        verdict_of(job_status(state).verdict)
        for found in runs.values():
            status = run_status(found, state, TrainingRunStatus(), 1, now)
            # What the API server would refuse would be tried again forever.
            msgspec.convert(msgspec.to_builtins(status), TrainingRunStatus)
            assert len(msgspec.json.encode(status)) < 256 << 10


class _Figures:
    """What rules read are the columns: mostly they are made of the changed windows, or changed one by one."""

    def __init__(self, plain: Mutator) -> None:
        self._random = plain.random
        self._messages = MessageMutator(plain, WatchRanksResponse, _WORDS)

    def mutate(self, data: bytes, other: bytes) -> bytes:
        changed = self._messages.mutate(data, other)
        chance = self._random.random()
        if chance > 0.8:
            return changed
        try:
            message = WatchRanksResponse.FromString(changed)
        except DecodeError:
            return changed
        if message.windows and chance < 0.5:
            message.columns.CopyFrom(response("", message.windows).columns)
        elif len(message.columns.values) >= 8:
            at = 8 * self._random.randrange(len(message.columns.values) // 8)
            values = bytearray(message.columns.values)
            values[at : at + 8] = struct.pack("<d", self._random.choice(FLOATS))
            message.columns.values = bytes(values)
        return message.SerializeToString()


def mutator(plain: Mutator) -> _Figures:
    return _Figures(plain)
