"""What a daemon tells about a capture, as it becomes the status of an object that the API server has to take."""

from __future__ import annotations

import msgspec
from google.protobuf.message import DecodeError

from rankscope.analysis.verdicts.thresholds import DEFAULT_POLICY
from rankscope.operator.captures.status import concluded, findings_of, summarised, updated_ranks
from rankscope.operator.kube.resources import CapturedRank, CaptureStatus
from rankscope.v1.capture_service_pb2 import Capture
from tests.fuzz.checking import check_number
from tests.fuzz.message_mutating import MessageMutator
from tests.fuzz.mutating import Mutator
from tests.fuzz.targets import recorded

SEEDS = recorded("answers")
STATUS_BYTES = 256 << 10
_WORDS = ("node-a", "kineto", "probe", "stacks", "analysed", "slow_rank", "rank 1 works longer")


def run(data: bytes) -> None:
    try:
        capture = Capture.FromString(data)
    except DecodeError:
        return
    before = [CapturedRank(rank=rank, node=node, state="running") for rank, node in enumerate(("node-a", "node-b"))]
    told = {"node-a": capture, "node-b": Capture.FromString(data)}
    status = CaptureStatus(ranks=updated_ranks(before, told), findings=findings_of(told, DEFAULT_POLICY))
    status = concluded(summarised(status), "", "", 1, 1.79e9)
    # The schema is made of the same types: what cannot be read back would be refused, and written again forever.
    read = msgspec.json.decode(msgspec.json.encode(status), type=CaptureStatus)
    assert len(read.ranks) == len(before) and len(msgspec.json.encode(status)) < STATUS_BYTES
    check_number(status.start_skew_ms if isinstance(status.start_skew_ms, float) else None)
    findings_of({"node-a": capture}, DEFAULT_POLICY)


def mutator(plain: Mutator) -> MessageMutator:
    return MessageMutator(plain, Capture, _WORDS)
