"""The shape of a decoder as counts, sufficient for its parameters, memory and FLOPs per token."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rankscope.analysis.models.mfu import TokenFlops


@dataclass(frozen=True)
class Attention:
    heads: int
    kv_heads: int
    key_size: int  # per head, including the positional part
    value_size: int
    weights: int  # parameters of matrix products
    extras: int  # biases, norms, sinks
    window: int | None  # number of tokens attended to; None: all


@dataclass(frozen=True)
class FeedForward:
    """`weights` and `width` count what all tokens pass through (a dense layer, shared experts, the router); routed
    experts are counted separately."""

    width: int
    gated: bool
    weights: int
    extras: int = 0
    experts: int = 0
    experts_used: int = 0
    expert_width: int = 0
    expert_weights: int = 0  # per expert
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
        """Parameters of experts that a token is not routed to."""
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
    notes: tuple[str, ...] = ()  # parts of the config that are not counted

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        tables = self.embedding * (1 if self.tied else 2)
        return tables + self.positions + self.final_norm + sum(layer.parameters for layer in self.layers)

    @property
    def active_parameters(self) -> int:
        """Parameters used by one token: all except experts that it is not routed to."""
        return self.parameters - sum(layer.idle_parameters for layer in self.layers)


class Counting(Enum):
    """`PALM`: 6N + 12·L·H·Q·T with N all active parameters including embeddings, and all layers attending to the
    whole sequence, as in published MFU numbers. `MATMUL`: the multiplications actually done; embeddings are lookups,
    norms and biases are free, a sliding window limits attention."""

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
    """Scores and the weighted sum. Shared key and value heads save memory, not multiplications."""
    return 6.0 * attention.heads * (attention.key_size + attention.value_size) * keys


def _keys_seen(attention: Attention, sequence: int, causal: bool) -> float:
    """The mean number of keys per token over the sequence."""
    window = min(attention.window or sequence, sequence)
    if not causal:
        return float(window)
    # The first `window` tokens attend to half of it on average, the others to all of it.
    return window - window * window / (2 * sequence)
