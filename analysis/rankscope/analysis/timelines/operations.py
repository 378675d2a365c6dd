"""The operations of a pipeline-parallel step: what each one waits for, and what is typical of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

FORWARD = "forward-compute"
BACKWARD = "backward-compute"
GC = "gc"
LAYERNORM = "layernorm-grads-all-reduce"
EMBEDDING = "embedding-grads-all-reduce"
PARAMS = "params-all-gather"
GRADS = "grads-reduce-scatter"
SEPARATE = "separate-grads-all-reduce"
CLIP = "optimizer-clip-main-grad"
OPTIMIZER = "optimizer"


class Waits(Enum):
    """With whom an operation starts together."""

    NOBODY = "nobody"
    PEER = "the other end of a send"
    REPLICAS = "the same stage of all data-parallel ranks"
    ENDS = "first and last stage"
    EVERYBODY = "everybody"


@dataclass(frozen=True)
class Operation:
    waits: Waits
    # Work of the rank itself; its typical duration is a mean. That of a communication is a median: one stuck transfer
    # must not become what is normal.
    own_work: bool
    family: str


_KNOWN = {
    FORWARD: Operation(Waits.NOBODY, True, FORWARD),
    BACKWARD: Operation(Waits.NOBODY, True, BACKWARD),
    GC: Operation(Waits.NOBODY, True, GC),
    OPTIMIZER: Operation(Waits.NOBODY, True, OPTIMIZER),
    # Runs inside a tensor-parallel group, which the timeline shows as one rank.
    LAYERNORM: Operation(Waits.NOBODY, False, LAYERNORM),
    EMBEDDING: Operation(Waits.ENDS, False, EMBEDDING),
    PARAMS: Operation(Waits.REPLICAS, False, PARAMS),
    GRADS: Operation(Waits.REPLICAS, False, GRADS),
    SEPARATE: Operation(Waits.REPLICAS, False, SEPARATE),
    CLIP: Operation(Waits.EVERYBODY, False, CLIP),
    "forward-send": Operation(Waits.PEER, False, "forward-pp-comm"),
    "forward-recv": Operation(Waits.PEER, False, "forward-pp-comm"),
    "backward-send": Operation(Waits.PEER, False, "backward-pp-comm"),
    "backward-recv": Operation(Waits.PEER, False, "backward-pp-comm"),
}
COMPUTES = (FORWARD, BACKWARD)
# After the last backward, in this order.
TAIL = (GC, LAYERNORM, EMBEDDING, GRADS, SEPARATE, CLIP, OPTIMIZER)


def is_known(name: str) -> bool:
    return name in _KNOWN


def describe(name: str) -> Operation:
    """An operation that is not known is taken for work of the rank itself."""
    return _KNOWN.get(name) or Operation(Waits.NOBODY, True, name)


def peer_of(name: str) -> str:
    """`forward-send` for `forward-recv` and the other way round."""
    return name.replace("send", "recv") if "send" in name else name.replace("recv", "send")
