"""Reads a Hugging Face config (the dict of config.json) into a ModelShape. Fields are validated; families differ in
defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rankscope.analysis.models.model_shape import Attention, FeedForward, Layer, ModelShape

# Far beyond any model. Larger values are mistakes and would only cost time and overflow.
MAX_VALUE = 10**9
MAX_LAYERS = 100_000


class ConfigError(ValueError):
    """The config cannot be used; the message names the field, the reason and the remedy."""


class Fields:
    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = values

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def count(self, *names: str, default: int | None = None) -> int:
        """A positive integer under the first of these names that is present."""
        for name in names:
            value = self._values.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_VALUE:
                raise ConfigError(f"{name} is {str(value)[:40]!r}, not an integer from 1 to {MAX_VALUE:,}")
            return value
        if default is None:
            raise ConfigError(f"{names[0]} is missing")
        return default

    def count_or_none(self, name: str) -> int | None:
        return self.count(name) if self.has(name) else None

    def whole(self, name: str, default: int) -> int:
        """Like `count`, but zero is allowed."""
        return 0 if self._values.get(name) == 0 else self.count(name, default=default)

    def flag(self, name: str, default: bool) -> bool:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(f"{name} is {str(value)[:40]!r}, not true or false")
        return value

    def number(self, name: str, default: float) -> float:
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{name} is {str(value)[:40]!r}, not a number")
        return float(value)

    def texts(self, name: str) -> tuple[str, ...] | None:
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{name} is not a list of strings")
        return tuple(value)

    def wholes(self, name: str) -> tuple[int, ...]:
        value = self._values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise ConfigError(f"{name} is not a list of integers")
        return tuple(value)

    def layers(self, *names: str) -> int:
        layers = self.count(*names)
        if layers > MAX_LAYERS:
            raise ConfigError(f"{names[0]} is {layers:,}, more layers than supported ({MAX_LAYERS:,})")
        return layers


@dataclass(frozen=True)
class _Family:
    """How Llama-like decoders differ."""

    tied: bool = False
    query_bias: bool = False  # bias of q, k, v if the config has no such field
    bias_field: str = "attention_bias"  # empty: the config has no such field
    output_bias: bool = True  # the output projection has a bias if q, k, v have
    head_norms: str = ""  # norms of queries and keys: per "head" size, or over the whole "projection"
    norms: int = 2
    experts: str = ""  # the field with their number
    shared_expert: bool = False
    windows: str = ""  # which layers attend only to the last sliding_window tokens


_LLAMA_LIKE = {
    "llama": _Family(),
    "mistral": _Family(windows="all"),
    "mixtral": _Family(windows="all", experts="num_local_experts"),
    "qwen2": _Family(query_bias=True, bias_field="", output_bias=False, windows="asked"),
    "qwen2_moe": _Family(
        query_bias=True,
        bias_field="qkv_bias",
        output_bias=False,
        windows="asked",
        experts="num_experts",
        shared_expert=True,
    ),
    "qwen3": _Family(head_norms="head", windows="asked"),
    "qwen3_moe": _Family(head_norms="head", windows="asked", experts="num_experts"),
    "gemma": _Family(tied=True),
    "gemma2": _Family(tied=True, norms=4, windows="every second is full"),
    "gemma3_text": _Family(tied=True, norms=4, head_norms="head", windows="every sixth is full"),
    "phi3": _Family(windows="all"),
    "olmo2": _Family(head_norms="projection"),
}


def read_config(config: Mapping[str, object]) -> ModelShape:
    """The shape of the (language) model. Raises ConfigError if the family is unknown or a field is invalid."""
    text_config = config.get("text_config")
    notes: tuple[str, ...] = ()
    if isinstance(text_config, Mapping) and config.get("model_type") not in FAMILIES:
        config, notes = text_config, ("only the language model of the config (text_config) is counted",)
    family = config.get("model_type")
    if family == "gemma3":
        family = "gemma3_text"
    if not isinstance(family, str) or family not in FAMILIES:
        problem = "has no model_type" if family is None else f"has model_type {str(family)[:40]!r}"
        raise ConfigError(f"it {problem}; known: {', '.join(FAMILIES)}")
    shape = _BUILDERS.get(family, _llama_like)(family, Fields(config))
    if shape.parameters > 10**16:
        raise ConfigError(f"{shape.parameters:.1e} parameters are more than any model has; check its sizes")
    return ModelShape(**{**vars(shape), "notes": shape.notes + notes})


def _llama_like(name: str, fields: Fields) -> ModelShape:
    family = _LLAMA_LIKE[name]
    width = fields.count("hidden_size")
    heads = fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", default=16 if name == "gemma" else heads)
    head = _head_size(fields, width, heads)
    _check_groups(heads, kv_heads)
    queries, keys = heads * head, kv_heads * head
    biased = fields.flag(family.bias_field, family.query_bias)
    extras = (queries + 2 * keys + (width if family.output_bias else 0)) if biased else 0
    extras += {"": 0, "head": 2 * head, "projection": queries + keys}[family.head_norms]
    weights = width * (queries + 2 * keys) + queries * width
    count = fields.layers("num_hidden_layers")
    windows = _windows(fields, count, family.windows)
    attentions = {w: Attention(heads, kv_heads, head, head, weights, extras, w) for w in set(windows)}
    sparse = _expert_layers(fields, count, family)
    # A model with experts in all layers may omit the width of a dense layer, and a dense model needs no experts.
    dense = None if all(sparse) else _gated(width, fields.count("intermediate_size"), fields.flag("mlp_bias", False))
    routed = _routed(fields, width, family) if any(sparse) else None
    layers = tuple(
        Layer(attentions[window], feed, family.norms * width)
        for window, has_experts in zip(windows, sparse, strict=True)
        if (feed := routed if has_experts else dense) is not None
    )
    return ModelShape(
        family=name,
        width=width,
        vocabulary=fields.count("vocab_size"),
        layers=layers,
        tied=fields.flag("tie_word_embeddings", family.tied),
        positions=0,
        final_norm=width,
        dropout=False,
    )


def _gated(width: int, inner: int, biased: bool) -> FeedForward:
    return FeedForward(inner, True, 3 * width * inner, 2 * inner + width if biased else 0)


def _expert_layers(fields: Fields, count: int, family: _Family) -> list[bool]:
    if not family.experts:
        return [False] * count
    dense = set(fields.wholes("mlp_only_layers"))
    every = fields.count("decoder_sparse_step", default=1)
    return [number not in dense and (number + 1) % every == 0 for number in range(count)]


def _routed(fields: Fields, width: int, family: _Family) -> FeedForward:
    experts = fields.count(family.experts)
    inner = fields.count("moe_intermediate_size", "intermediate_size")
    weights, shared = width * experts, 0
    if family.shared_expert:
        shared = fields.count("shared_expert_intermediate_size")
        weights += 3 * width * shared + width  # and its gate
    used = _experts_used(fields, experts)
    return FeedForward(shared, True, weights, 0, experts, used, inner, 3 * width * inner)


def _experts_used(fields: Fields, experts: int) -> int:
    used = fields.count("num_experts_per_tok")
    if used > experts:
        raise ConfigError(f"num_experts_per_tok is {used}, but there are {experts} experts")
    return used


def _deepseek(name: str, fields: Fields) -> ModelShape:
    width = fields.count("hidden_size")
    heads = fields.count("num_attention_heads")
    nope, rope = fields.count("qk_nope_head_dim"), fields.count("qk_rope_head_dim")
    value = fields.count("v_head_dim")
    rank = fields.count("kv_lora_rank")
    query_rank = fields.count_or_none("q_lora_rank")
    queries = heads * (nope + rope)
    weights = width * queries if query_rank is None else width * query_rank + query_rank * queries
    weights += width * (rank + rope) + rank * heads * (nope + value) + heads * value * width
    extras = rank + (query_rank or 0)  # norms of the low-rank parts
    if fields.flag("attention_bias", False):
        extras += (query_rank or 0) + rank + rope + width
    attention = Attention(heads, heads, nope + rope, value, weights, extras, None)
    experts = fields.count_or_none("n_routed_experts")
    first = fields.whole("first_k_dense_replace", 0)
    every = fields.count("moe_layer_freq", default=1)
    count = fields.layers("num_hidden_layers")
    sparse = [experts is not None and number >= first and number % every == 0 for number in range(count)]
    dense = None if all(sparse) else _gated(width, fields.count("intermediate_size"), False)
    routed = None
    if experts is not None:
        inner = fields.count("moe_intermediate_size")
        shared = fields.whole("n_shared_experts", 0) * inner
        weights = width * experts + 3 * width * shared
        routed = FeedForward(
            shared, True, weights, 0, experts, _experts_used(fields, experts), inner, 3 * width * inner
        )
    notes = []
    if fields.has("num_nextn_predict_layers") and fields.whole("num_nextn_predict_layers", 0):
        notes.append("layers for multi-token prediction (num_nextn_predict_layers) are not counted")
    return ModelShape(
        family=name,
        width=width,
        vocabulary=fields.count("vocab_size"),
        layers=tuple(Layer(attention, feed, 2 * width) for s in sparse if (feed := routed if s else dense) is not None),
        tied=fields.flag("tie_word_embeddings", False),
        positions=0,
        final_norm=width,
        dropout=False,
        notes=tuple(notes),
    )


def _gpt_oss(name: str, fields: Fields) -> ModelShape:
    width, inner = fields.count("hidden_size"), fields.count("intermediate_size")
    heads = fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", default=heads)
    head = _head_size(fields, width, heads)
    _check_groups(heads, kv_heads)
    queries, keys = heads * head, kv_heads * head
    weights = width * (queries + 2 * keys) + queries * width
    extras = heads + (queries + 2 * keys + width if fields.flag("attention_bias", True) else 0)
    experts = fields.count("num_local_experts")
    feed = FeedForward(
        0,
        True,
        width * experts,
        experts,
        experts,
        _experts_used(fields, experts),
        inner,
        3 * width * inner,
        2 * inner + width,
    )
    windows = _windows(fields, fields.layers("num_hidden_layers"), "every second is full")
    layers = tuple(Layer(Attention(heads, kv_heads, head, head, weights, extras, w), feed, 2 * width) for w in windows)
    tied = fields.flag("tie_word_embeddings", False)
    return ModelShape(name, width, fields.count("vocab_size"), layers, tied, 0, width, False)


def _gpt(name: str, fields: Fields) -> ModelShape:
    """GPT-2 and GPT-NeoX: biases everywhere, layer norms with a bias, an MLP without a gate."""
    width = fields.count("n_embd", "hidden_size")
    heads = fields.count("n_head", "num_attention_heads")
    inner = fields.count("n_inner", "intermediate_size", default=4 * width)
    head = _head_size(fields, width, heads)
    biases = 4 * width if fields.flag("attention_bias", True) else 0
    attention = Attention(heads, heads, head, head, 4 * width * width, biases, None)
    feed = FeedForward(inner, False, 2 * width * inner, inner + width)
    count = fields.layers("n_layer", "num_hidden_layers")
    learned = name == "gpt2"
    positions = fields.count("n_positions", "n_ctx", "max_position_embeddings") * width if learned else 0
    tied = fields.flag("tie_word_embeddings", learned)
    dropout = fields.number("resid_pdrop" if learned else "hidden_dropout", 0.1 if learned else 0.0) > 0
    layers = (Layer(attention, feed, 4 * width),) * count
    return ModelShape(name, width, fields.count("vocab_size"), layers, tied, positions, 2 * width, dropout)


def _head_size(fields: Fields, width: int, heads: int) -> int:
    if fields.has("head_dim"):
        return fields.count("head_dim")
    if width % heads:
        raise ConfigError(f"hidden_size {width} is not divisible by num_attention_heads {heads}; give head_dim")
    return width // heads


def _check_groups(heads: int, kv_heads: int) -> None:
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads {heads} is not divisible by num_key_value_heads {kv_heads}")


def _windows(fields: Fields, count: int, which: str) -> list[int | None]:
    window = fields.count_or_none("sliding_window")
    if which == "" or window is None or (which == "asked" and not fields.flag("use_sliding_window", False)):
        return [None] * count
    kinds = fields.texts("layer_types")
    if kinds is not None:
        if len(kinds) != count:
            raise ConfigError(f"layer_types names {len(kinds)} layers, num_hidden_layers {count}")
        return [window if kind == "sliding_attention" else None for kind in kinds]
    if which == "asked":
        full = fields.whole("max_window_layers", 28)
        return [None if number < full else window for number in range(count)]
    every = {"all": 0, "every second is full": 2, "every sixth is full": 6}[which]
    if which == "every sixth is full":
        every = fields.count("sliding_window_pattern", default=every)
    return [None if every and (number + 1) % every == 0 else window for number in range(count)]


_BUILDERS: dict[str, Callable[[str, Fields], ModelShape]] = {
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gpt_oss": _gpt_oss,
    "gpt2": _gpt,
    "gpt_neox": _gpt,
}


FAMILIES = (*_LLAMA_LIKE, *_BUILDERS)
