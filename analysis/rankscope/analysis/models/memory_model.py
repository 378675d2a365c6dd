"""Predicts the memory of a training rank from the model's shape and the parallelism: weights, gradients, optimizer
state and activations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rankscope.analysis.models.mfu import Recompute
from rankscope.analysis.models.model_shape import Layer, ModelShape

# Bytes of optimizer state per parameter, without a master copy of the weights.
OPTIMIZER_BYTES: Mapping[str, float] = {"adam": 8, "adam8bit": 2, "sgd-momentum": 4, "sgd": 0}
MASTER_BYTES = 4


@dataclass(frozen=True)
class Spread:
    """The parallelism. `zero` 1 shards optimizer state over the data-parallel ranks, 2 also gradients, 3 (FSDP) also
    weights."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    zero: int = 0
    sequence_parallel: bool = False


@dataclass(frozen=True)
class Training:
    sequence: int
    micro_batch: int = 1
    micro_batches: int | None = None  # per step; None: enough to fill the pipeline
    recompute: Recompute = Recompute.NONE
    flash_attention: bool = True  # scores are never stored
    optimizer: str = "adam"
    weight_bytes: int = 2
    gradient_bytes: int = 2

    @property
    def optimizer_bytes(self) -> float:
        """Per parameter, including the fp32 copy of training in 16 bits."""
        return OPTIMIZER_BYTES[self.optimizer] + (MASTER_BYTES if self.weight_bytes < MASTER_BYTES else 0)


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one rank of a pipeline stage. `transient_bytes` exist only within the backward pass of one layer."""

    stage: int
    parameters: int  # before sharding over data-parallel ranks
    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    activation_bytes: float
    transient_bytes: float

    @property
    def total_bytes(self) -> float:
        return (
            self.parameter_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.activation_bytes
            + self.transient_bytes
        )


def predict_memory(shape: ModelShape, spread: Spread, training: Training) -> tuple[StageMemory, ...]:
    """Per pipeline stage, in order. The largest decides whether a job fits."""
    stages = _split(len(shape.layers), spread.pipeline)
    first = 0
    results = []
    for stage, count in enumerate(stages):
        layers = shape.layers[first : first + count]
        first += count
        is_first, is_last = stage == 0, stage == spread.pipeline - 1
        held = sum(layer.parameters for layer in layers)
        held += shape.embedding + shape.positions if is_first else 0
        # A tied output projection on another stage than the embedding is a second copy.
        held += shape.final_norm + (0 if shape.tied and is_first else shape.embedding) if is_last else 0
        share = held / spread.tensor
        in_flight = spread.pipeline - stage
        if training.micro_batches is not None:
            in_flight = min(in_flight, training.micro_batches)
        activations = sum(layer_activations(shape, layer, spread, training) for layer in layers) * in_flight
        activations += _edges(shape, spread, training, is_first, is_last, in_flight)
        shards = [spread.data if spread.zero >= level else 1 for level in (1, 2, 3)]
        results.append(
            StageMemory(
                stage=stage,
                parameters=held,
                parameter_bytes=share * training.weight_bytes / shards[2],
                gradient_bytes=share * training.gradient_bytes / shards[1],
                optimizer_bytes=share * training.optimizer_bytes / shards[0],
                activation_bytes=activations,
                transient_bytes=_transient(shape, layers, spread, training),
            )
        )
    return tuple(results)


def layer_activations(shape: ModelShape, layer: Layer, spread: Spread, training: Training) -> float:
    """Bytes that the forward pass of one micro-batch stores for the backward pass in one layer, after Korthikanti et
    al. (Reducing Activation Recomputation in Large Transformer Models), for any head count and feed-forward width."""
    if training.recompute is Recompute.FULL:
        inputs = _tokens(training) * shape.width * training.weight_bytes
        return inputs / spread.tensor if spread.sequence_parallel else inputs
    return _stored(shape, layer, spread, training, scores=training.recompute is Recompute.NONE)


def _stored(shape: ModelShape, layer: Layer, spread: Spread, training: Training, *, scores: bool) -> float:
    tokens, item, width = _tokens(training), training.weight_bytes, shape.width
    attention, feed = layer.attention, layer.feed_forward
    # Inputs of both norms, of the query projection and of the feed-forward layer; a dropout mask takes one byte.
    whole = item * 4 * width + (2 * width if shape.dropout else 0)
    split = item * (attention.heads + attention.kv_heads) * (attention.key_size + attention.value_size)
    inner = feed.width + feed.experts_used * feed.expert_width
    split += item * (4 if feed.gated else 2) * inner
    split += item * feed.experts_used * width  # a routed token is copied to each of its experts
    split += 4 * attention.heads if training.flash_attention else 0  # the softmax's normaliser
    whole_share = whole / spread.tensor if spread.sequence_parallel else whole
    total = tokens * (whole_share + split / spread.tensor)
    if scores and not training.flash_attention:
        per_score = 2 * item + 1 if shape.dropout else item
        total += per_score * attention.heads * training.sequence * tokens / spread.tensor
    return total


def _transient(shape: ModelShape, layers: tuple[Layer, ...], spread: Spread, training: Training) -> float:
    if not layers:
        return 0.0
    repeated = 0.0
    if training.recompute is Recompute.FULL:
        repeated = max(_stored(shape, layer, spread, training, scores=True) for layer in set(layers))
    gathered = 0.0
    if spread.zero >= 3:  # one layer is computed while the next is gathered
        gathered = 2 * max(layer.parameters for layer in set(layers)) / spread.tensor * training.weight_bytes
    return repeated + gathered


def _edges(
    shape: ModelShape, spread: Spread, training: Training, is_first: bool, is_last: bool, in_flight: int
) -> float:
    tokens = _tokens(training)
    total = tokens * shape.width * in_flight if is_first and shape.dropout else 0.0
    if is_last:
        # Logits in fp32 and their log-softmax, as PyTorch's cross entropy keeps them. A fused loss keeps less.
        logits = 8 * shape.vocabulary / spread.tensor
        total += tokens * (2 * training.weight_bytes * shape.width + logits)
    return total


def _tokens(training: Training) -> float:
    return float(training.sequence * training.micro_batch)


def _split(layers: int, stages: int) -> list[int]:
    """As even as possible; earlier stages take the remainder."""
    return [layers // stages + (1 if stage < layers % stages else 0) for stage in range(stages)]
