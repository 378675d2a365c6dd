"""What a daemon sends: a stolen certificate or a hostile node may say anything. It must not reach the ranks
of other nodes, and must not end the thread that judges all jobs."""

from __future__ import annotations

import math
import warnings

import msgspec
from google.protobuf.message import DecodeError

from rankscope.operator.correlation.batch_reading import read_batch
from rankscope.operator.correlation.correlator import Correlator, LostSeconds
from rankscope.operator.correlation.held_windows import HeldWindow
from rankscope.operator.correlation.job_service import job_status, verdict_of
from rankscope.operator.correlation.measuring import CAUSES, ROW, measure, rows
from rankscope.operator.correlation.wire_shapes import Message, read_figures, read_said
from rankscope.operator.kube.resources import TrainingRunStatus
from rankscope.operator.metrics import Exporter
from rankscope.operator.runs.inventory import Inventory
from rankscope.operator.runs.pods import Pod
from rankscope.operator.runs.rank_binding import Binding
from rankscope.operator.runs.status import run_status
from rankscope.v1.rank_service_pb2 import WatchRanksResponse
from tests.fuzz.checking import check_metrics, check_number
from tests.fuzz.message_mutating import MessageMutator
from tests.fuzz.mutating import Mutator
from tests.fuzz.targets import recorded

SEEDS = recorded("windows")
NODE, OTHER_NODE = "node-a", "node-b"
UIDS = ("0a1b2c3d-1111-2222-3333-444455556666", "0a1b2c3d-1111-2222-3333-444455557777")
_WORDS = (*UIDS, NODE, OTHER_NODE, "train", "forward", "backward", "input", "communication", "other", "steps", "stacks")
_LABELS = {"training.kubeflow.org/job-name": "train"}
CPU_SECONDS = 2.0
_GOOD = WatchRanksResponse.FromString(SEEDS[0]).windows[0].SerializeToString()


def run(data: bytes) -> None:
    try:
        said = read_said(data)
    except DecodeError:
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
        _check_batch([*said.windows])
        for _ in range(3):
            heard = binding.bind([Message(NODE, said)])
            assert len(heard.windows) <= len(said.windows)
            for window in heard.windows:
                _check_window(window)
            correlator.take(heard.windows, heard.departed)
            correlator.tick()
            now[0] += 5.0
            correlator.tick()
        _check_states(correlator, lost, inventory, now[0], data)


def _check_batch(windows: list[bytes]) -> None:
    """Many windows are read in step. Among them a garbled one takes nothing of its neighbours and changes nothing of
    them, and what is read of it is what protobuf reads."""
    together = [part for window in windows[:8] for part in (_GOOD, window)] + [_GOOD]
    batch = read_batch(together)
    for number, window in enumerate(together):
        assert batch.is_read[number] or window != _GOOD
        try:
            alone = read_figures(window)
            measured = rows([measure(alone)])
        except DecodeError:
            continue
        if not batch.is_read[number]:
            continue
        start, end = int(batch.identity_start[number]), int(batch.identity_end[number])
        assert 0 <= start <= end <= len(window) and window[start:end] == alone.identity
        times = int(batch.start_unix_nanos[number]), int(batch.end_unix_nanos[number])
        assert times == (alone.start_unix_nanos, alone.end_unix_nanos)
        for name, read in zip(ROW, batch.rows[number].tolist(), strict=True):
            value = float(measured[name][0])
            same = read == value or (math.isnan(read) and math.isnan(value))
            # A difference of two times may not fit, parts that come twice are merged by protobuf, and the largest count
            # stands for none.
            loose = ("window_nanos", "run_delay", "throttled", "stopped")
            assert same or name in loose or abs(read) >= 2.0**63, (name, read, value)


def _check_window(held: HeldWindow) -> None:
    """It is the node's own, and the short way of reading it agrees with the long one."""
    message = held.message()
    for identity in (held.identity, message.identity):
        assert identity.job.startswith("team/") and identity.node == NODE and identity.pod == UIDS[0]
    message.DiscardUnknownFields()
    measured = {
        name: float(column[0]) for name, column in rows([measure(read_figures(message.SerializeToString()))]).items()
    }
    causes = message.causes
    expected = {cause: getattr(causes, cause) if causes.HasField(cause) else math.nan for cause in CAUSES}
    expected["step_mean"] = message.step.mean_seconds if message.HasField("step") else math.nan
    expected["self_p90"] = message.self.p90_seconds if message.HasField("self") else math.nan
    expected["wait_p10"] = message.wait.p10_seconds if message.HasField("wait") else math.nan
    for name, value in expected.items():
        read = measured[name]
        assert read == value or (math.isnan(read) and math.isnan(value)), (name, read, value)


def _check_states(correlator: Correlator, lost: LostSeconds, inventory: Inventory, now: float, data: bytes) -> None:
    states = correlator.states
    check_metrics(
        Exporter(lambda: states, lost, lambda job: None).collect(), series=200 * max(1, len(states)), data=data
    )
    runs = inventory.runs()
    for state in states:
        for value in (state.step_seconds, state.mfu_ratio, state.exposed_communication_ratio):
            check_number(value)
        check_number(state.verdict.impact_ratio)
        check_number(state.verdict.lost_gpu_seconds)
        verdict_of(job_status(state).verdict)
        for found in runs.values():
            status = run_status(found, state, TrainingRunStatus(), 1, now)
            # What the API server would refuse would be tried again for ever.
            msgspec.convert(msgspec.to_builtins(status), TrainingRunStatus)
            assert len(msgspec.json.encode(status)) < 256 << 10


def mutator(plain: Mutator) -> MessageMutator:
    return MessageMutator(plain, WatchRanksResponse, _WORDS)
