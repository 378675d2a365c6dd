"""FLOPs of one token, forward and backward, through a model of known shape."""

from __future__ import annotations

from enum import Enum

from rankscope.analysis.mfu import TokenFlops
from rankscope.analysis.model_flops_shape import Attention, ModelShape


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
