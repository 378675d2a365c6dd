from __future__ import annotations

from collections.abc import Mapping

import pytest

from rankscope.analysis.models.mfu import Recompute, palm_token_flops, utilisation
from rankscope.analysis.models.model_config import FAMILIES, ConfigError, read_config
from rankscope.analysis.models.model_shape import Counting, count_flops

Config = Mapping[str, object]


def config(
    family: str, width: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int, **more: object
) -> Config:
    return {
        "model_type": family,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        **more,
    }


LLAMA_3_8B = config("llama", 4096, 14336, 32, 32, 8, 128256)
MIXTRAL = config("mixtral", 4096, 14336, 32, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2)
GPT2: Config = {
    "model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257,
}  # fmt: skip
MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
DEEPSEEK_V2_LITE = config(
    "deepseek_v2", 2048, 10944, 27, 16, 16, 102400, moe_intermediate_size=1408, n_routed_experts=64, n_shared_experts=2,
    num_experts_per_tok=6, first_k_dense_replace=1, q_lora_rank=None, **MLA,
)  # fmt: skip
DEEPSEEK_V3 = config(
    "deepseek_v3", 7168, 18432, 61, 128, 128, 129280, moe_intermediate_size=2048, n_routed_experts=256,
    n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=3, q_lora_rank=1536, num_nextn_predict_layers=1,
    **MLA,
)  # fmt: skip


@pytest.mark.parametrize(
    ("model", "parameters", "active"),
    [
        (config("llama", 4096, 11008, 32, 32, 32, 32000), 6_738_415_616, None),  # Llama 2 7B
        (LLAMA_3_8B, 8_030_261_248, None),
        (config("mistral", 4096, 14336, 32, 32, 8, 32000, sliding_window=4096), 7_241_732_096, None),
        (MIXTRAL, 46_702_792_704, 12_879_925_248),
        (config("qwen2", 3584, 18944, 28, 28, 4, 152064), 7_615_616_512, None),
        (config("qwen3", 1024, 3072, 28, 16, 8, 151936, head_dim=128, tie_word_embeddings=True), 596_049_920, None),
        (
            config("qwen2_moe", 2048, 5632, 24, 16, 16, 151936, num_experts=60, num_experts_per_tok=4,
                   moe_intermediate_size=1408, shared_expert_intermediate_size=5632),
            14_315_784_192, 2_689_173_504,
        ),  # Qwen1.5-MoE-A2.7B
        (
            config("qwen3_moe", 2048, 6144, 48, 32, 4, 151936, head_dim=128, num_experts=128, num_experts_per_tok=8,
                   moe_intermediate_size=768),
            30_532_122_624, 3_353_032_704,
        ),  # Qwen3-30B-A3B
        (config("gemma", 3072, 24576, 28, 16, 16, 256000, head_dim=256), 8_537_680_896, None),  # 7B
        (config("gemma2", 3584, 14336, 42, 16, 8, 256000, head_dim=256, sliding_window=4096), 9_241_705_984, None),
        (config("gemma3_text", 1152, 6912, 26, 4, 1, 262144, head_dim=256, sliding_window=512), 999_885_952, None),
        (config("phi3", 3072, 8192, 32, 32, 32, 32064), 3_821_079_552, None),
        (GPT2, 124_439_808, None),
        (config("gpt_neox", 6144, 24576, 44, 64, 64, 50432), 20_554_567_680, None),
        (
            config("gpt_oss", 2880, 2880, 24, 64, 8, 201088, head_dim=64, num_local_experts=32, num_experts_per_tok=4,
                   sliding_window=128),
            20_914_757_184, None,
        ),
        (DEEPSEEK_V2_LITE, 15_706_484_224, None),
        (DEEPSEEK_V3, 671_026_404_352, 37_552_282_624),
    ],
    ids=lambda value: str(value["model_type"]) if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_config_has_exactly_the_parameters_of_the_published_model(
    model: Config, parameters: int, active: int | None
) -> None:
    shape = read_config(model)
    assert shape.parameters == parameters
    if active is not None:
        assert shape.active_parameters == active
    elif not any(layer.feed_forward.experts for layer in shape.layers):
        assert shape.active_parameters == parameters


def test_a_dense_config_counts_as_the_palm_formula_does() -> None:
    assert count_flops(read_config(LLAMA_3_8B), 8192).model == palm_token_flops(8_030_261_248, 32, 4096, 8192).model


def test_llama_3_70b_reaches_its_published_mfu_from_counted_parameters() -> None:
    """torchtitan's 64 A100s: 331 tokens per second and GPU are 51.7 %."""
    shape = read_config(config("llama", 8192, 28672, 80, 64, 8, 128256))
    assert shape.parameters == 70_553_706_496
    used = utilisation(count_flops(shape, 8192), 331, 1, 312e12, Recompute.NONE)
    assert f"{100 * used.mfu_ratio:.1f}" == "51.7"


def test_experts_that_a_token_does_not_visit_cost_nothing() -> None:
    assert count_flops(read_config(MIXTRAL), 4096).model == palm_token_flops(12_879_925_248, 32, 4096, 4096).model


def test_multiplications_leave_out_the_lookup_and_count_the_head() -> None:
    flops = count_flops(read_config(LLAMA_3_8B), 8192, Counting.MATMUL)
    attention = 4096 * 4096 * 2 + 2 * 4096 * 1024
    assert flops.weights == 6 * 32 * (attention + 3 * 4096 * 14336)
    assert flops.head == 6 * 4096 * 128256
    assert flops.attention == 12 * 32 * 4096 * 8192
    assert flops.hardware(Recompute.FULL) == flops.model + (flops.weights + flops.attention) / 3


def test_a_window_is_all_that_a_token_sees() -> None:
    windowed = read_config(config("mistral", 4096, 14336, 32, 32, 8, 32000, sliding_window=1024))
    assert count_flops(windowed, 8192, Counting.MATMUL).attention == 12 * 32 * 4096 * 1024
    assert count_flops(windowed, 512, Counting.MATMUL).attention == 12 * 32 * 4096 * 512
    assert count_flops(windowed, 8192, Counting.PALM).attention == 12 * 32 * 4096 * 8192
    # 1024 tokens that see half a window and 7168 that see a whole one.
    seen = (1024 * 512 + 7168 * 1024) / 8192
    assert count_flops(windowed, 8192, Counting.MATMUL, causal=True).attention == 12 * 32 * 4096 * seen
    alternating = read_config(config("gemma2", 256, 512, 4, 4, 4, 1000, sliding_window=128))
    assert [layer.attention.window for layer in alternating.layers] == [128, None, 128, None]


def test_keys_and_values_of_different_size_are_counted_apart() -> None:
    flops = count_flops(read_config(DEEPSEEK_V3), 4096)
    assert flops.attention == 6 * 61 * 128 * (192 + 128) * 4096


def test_what_a_config_holds_beyond_the_count_is_said() -> None:
    assert "num_nextn_predict_layers" in read_config(DEEPSEEK_V3).notes[0]
    wrapped = read_config({"model_type": "llava", "text_config": LLAMA_3_8B})
    assert wrapped.parameters == 8_030_261_248
    assert "text_config" in wrapped.notes[0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "mamba"}, "known: llama"),
        ({"model_type": None}, "has no model_type"),
        ({"model_type": ["llama"]}, "known: llama"),
        ({"hidden_size": 0}, "hidden_size is '0'"),
        ({"hidden_size": -4096}, "hidden_size"),
        ({"hidden_size": 4096.5}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": float("nan")}, "hidden_size"),
        ({"hidden_size": "4096"}, "hidden_size"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": 10**400}, "hidden_size"),
        ({"num_hidden_layers": 10**9}, "more layers than"),
        ({"num_attention_heads": 33}, "give head_dim"),
        ({"num_key_value_heads": 5}, "is not divisible"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"vocab_size": 10**9, "hidden_size": 10**9, "head_dim": 128}, "more than any model"),
    ],
)
def test_a_senseless_config_is_refused_by_its_field(change: Config, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_config({**LLAMA_3_8B, **change})


def test_more_experts_per_token_than_experts_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_experts_per_tok is 9"):
        read_config({**MIXTRAL, "num_experts_per_tok": 9})


def test_an_empty_config_of_any_family_is_refused() -> None:
    for family in FAMILIES:
        with pytest.raises(ConfigError, match="is missing"):
            read_config({"model_type": family})
