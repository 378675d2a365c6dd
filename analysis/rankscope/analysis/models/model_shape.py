"""What a decoder's layers are made of, as counts: enough for parameters, FLOPs and memory."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rankscope.analysis.models.mfu import TokenFlops


@dataclass(frozen=True)
class Attention:
    heads: int
    kv_heads: int
    key_size: int  # of one head, position part included
    value_size: int
    weights: int  # parameters that are multiplied with
    extras: int  # biases, norms, sinks
    window: int | None  # tokens looked back at; None: all


@dataclass(frozen=True)
class FeedForward:
    """`weights` and `width` are of what every token passes (a dense layer, shared experts, the router); routed experts
    are counted apart."""

    width: int
    gated: bool
    weights: int
    extras: int = 0
    experts: int = 0
    experts_used: int = 0
    expert_width: int = 0
    expert_weights: int = 0  # of one expert
    expert_extras: int = 0


@dataclass(frozen=True)
class Layer:
    attention: Attention
    feed_forward: FeedForward
    norms: int

    @property
    def expert_parameters(self) -> int:
        feed = self.feed_forward
        return feed.experts * (feed.expert_weights + feed.expert_extras)

    @property
    def parameters(self) -> int:
        attention, feed = self.attention, self.feed_forward
        return attention.weights + attention.extras + feed.weights + feed.extras + self.norms + self.expert_parameters

    @property
    def idle_parameters(self) -> int:
        """Of the experts that a token does not visit."""
        feed = self.feed_forward
        return (feed.experts - feed.experts_used) * (feed.expert_weights + feed.expert_extras)

    @property
    def weights_used(self) -> int:
        feed = self.feed_forward
        return self.attention.weights + feed.weights + feed.experts_used * feed.expert_weights


@dataclass(frozen=True)
class ModelShape:
    family: str
    width: int
    vocabulary: int
    layers: tuple[Layer, ...]
    tied: bool  # the output projection is the embedding
    positions: int  # parameters of learned positions
    final_norm: int
    dropout: bool
    notes: tuple[str, ...] = ()  # what the config holds beyond what is counted

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        tables = self.embedding * (1 if self.tied else 2)
        return tables + self.positions + self.final_norm + sum(layer.parameters for layer in self.layers)

    @property
    def active_parameters(self) -> int:
        """That one token passes: all but the experts it is not routed to."""
        return self.parameters - sum(layer.idle_parameters for layer in self.layers)


# FLOPs of one token, forward and backward, through a model of known shape.


class Counting(Enum):
    """`PALM`: 6N + 12·L·H·Q·T with N all active parameters, embeddings included, and every layer looking at the whole
    sequence: what published MFU numbers use. `MATMUL`: the multiplications that are really done; an embedding is
    looked up, norms and biases are free, a sliding window looks no further."""

    PALM = "palm"
    MATMUL = "matmul"


def count_flops(
    shape: ModelShape, sequence: int, counting: Counting = Counting.PALM, *, causal: bool = False
) -> TokenFlops:
    if counting is Counting.PALM:
        attention = sum(_attention(layer.attention, sequence) for layer in shape.layers)
        return TokenFlops(6.0 * shape.active_parameters, attention * (0.5 if causal else 1.0))
    return TokenFlops(
        weights=6.0 * sum(layer.weights_used for layer in shape.layers),
        attention=sum(
            _attention(layer.attention, _keys_seen(layer.attention, sequence, causal)) for layer in shape.layers
        ),
        head=6.0 * shape.embedding,
    )


def _attention(attention: Attention, keys: float) -> float:
    """Scores and the weighted sum. Key and value heads that are shared save memory, not multiplications."""
    return 6.0 * attention.heads * (attention.key_size + attention.value_size) * keys


def _keys_seen(attention: Attention, sequence: int, causal: bool) -> float:
    """By a token, on average over the sequence."""
    window = min(attention.window or sequence, sequence)
    if not causal:
        return float(window)
    # The first `window` tokens see half of it on average, the others all of it.
    return window - window * window / (2 * sequence)
