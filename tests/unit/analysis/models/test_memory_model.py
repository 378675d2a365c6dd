from __future__ import annotations

import pytest

from rankscope.analysis.models.memory_model import Spread, Training, layer_activations, predict_memory
from rankscope.analysis.models.mfu import Recompute
from rankscope.analysis.models.model_config import read_config
from rankscope.analysis.models.model_shape import ModelShape

S, B, H, A = 2048, 2, 12288, 96


def gpt(width: int, heads: int, layers: int, vocabulary: int = 51200) -> ModelShape:
    return read_config(
        {
            "model_type": "gpt2",
            "n_embd": width,
            "n_layer": layers,
            "n_head": heads,
            "n_positions": 2048,
            "vocab_size": vocabulary,
        }
    )


def test_a_layer_stores_what_korthikanti_et_al_count() -> None:
    """Table 2 of "Reducing Activation Recomputation in Large Transformer Models"."""
    model = gpt(H, A, 96)
    stored = Training(S, B, flash_attention=False)
    selective = Training(S, B, flash_attention=False, recompute=Recompute.SELECTIVE)
    full = Training(S, B, flash_attention=False, recompute=Recompute.FULL)
    sbh = S * B * H
    for t in (1, 8):
        for spread, outside in ((Spread(tensor=t), 10.0), (Spread(tensor=t, sequence_parallel=True), 10 / t)):
            layer = model.layers[0]
            assert layer_activations(model, layer, spread, stored) == sbh * (outside + 24 / t + 5 * A * S / H / t)
            assert layer_activations(model, layer, spread, selective) == sbh * (outside + 24 / t)
    assert layer_activations(model, model.layers[0], Spread(tensor=8), full) == 2 * sbh


def test_shared_key_heads_and_gates_change_what_is_stored() -> None:
    def stored(**change: int) -> float:
        config = {
            "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 1,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 1000, **change,
        }  # fmt: skip
        shape = read_config(config)
        return layer_activations(shape, shape.layers[0], Spread(), Training(1000))

    # Two bytes each: four inputs of width h, q and o, k and v of eight heads, four tensors of the gated MLP; and the
    # normaliser of flash attention in fp32.
    assert stored() == 1000 * (2 * (4 * 4096 + 2 * 4096 + 2 * 1024 + 4 * 14336) + 4 * 32)
    assert stored(num_key_value_heads=32) - stored() == 1000 * 2 * 2 * (4096 - 1024)


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.88)])
def test_zero_shards_as_its_paper_says(zero: int, gigabytes: float) -> None:
    """7.5 billion parameters with Adam on 64 ranks: figure 1 of "ZeRO: Memory Optimizations"."""
    model = gpt(4096, 32, 37, vocabulary=7232)
    assert model.parameters == pytest.approx(7.5e9, rel=0.002)
    stage = predict_memory(model, Spread(data=64, zero=zero), Training(1))[0]
    held = stage.parameter_bytes + stage.gradient_bytes + stage.optimizer_bytes
    assert held / 1e9 == pytest.approx(gigabytes, rel=0.005)


@pytest.mark.parametrize(
    ("optimizer", "weight_bytes", "expected"),
    [("adam", 2, 12), ("adam8bit", 2, 6), ("sgd-momentum", 2, 8), ("sgd", 2, 4), ("adam", 4, 8), ("sgd", 4, 0)],
)
def test_an_optimizer_holds_moments_and_master_copies_of_short_weights(
    optimizer: str, weight_bytes: int, expected: float
) -> None:
    model = gpt(768, 12, 12)
    training = Training(1, optimizer=optimizer, weight_bytes=weight_bytes)
    assert predict_memory(model, Spread(), training)[0].optimizer_bytes == expected * model.parameters


def test_the_first_stage_keeps_the_most_micro_batches() -> None:
    model = read_config(
        {
            "model_type": "llama",
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_hidden_layers": 10,
            "num_attention_heads": 8,
            "vocab_size": 1000,
        }
    )
    stages = predict_memory(model, Spread(pipeline=4), Training(128))
    assert sum(stage.parameters for stage in stages) == model.parameters
    layer = layer_activations(model, model.layers[0], Spread(), Training(128))
    assert stages[0].activation_bytes == 4 * 3 * layer
    assert stages[2].activation_bytes == 2 * 2 * layer
    two = predict_memory(model, Spread(pipeline=4), Training(128, micro_batches=2))
    assert two[0].activation_bytes == 2 * 3 * layer


def test_tied_embeddings_on_two_stages_are_two_copies() -> None:
    model = gpt(768, 12, 12)
    held = sum(stage.parameters for stage in predict_memory(model, Spread(pipeline=2), Training(1)))
    assert held == model.parameters + model.embedding


def test_recomputing_a_layer_needs_room_for_one_layer() -> None:
    model = gpt(768, 12, 12)
    plain = predict_memory(model, Spread(), Training(1024))[0]
    full = predict_memory(model, Spread(), Training(1024, recompute=Recompute.FULL))[0]
    assert full.activation_bytes < plain.activation_bytes
    assert full.transient_bytes == layer_activations(model, model.layers[0], Spread(), Training(1024))
    assert plain.transient_bytes == 0
