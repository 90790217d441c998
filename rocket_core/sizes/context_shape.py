"""What the layers of a model keep of a context, from its config.json: keys and values, latents, states."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rocket_core.errors import UnsupportedArchitectureError

_FULL, _WINDOW, _STATE = "full_attention", "sliding_attention", "linear_attention"
_TYPES: Mapping[object, str] = {_FULL: _FULL, "attention": _FULL, _WINDOW: _WINDOW, _STATE: _STATE, "mamba": _STATE}

# Fields that files may leave out where they have the value that is usual in the family.
_USUAL: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "gemma": {"head_dim": 256},
        "gemma2": {"head_dim": 256},
        "gemma3_text": {
            "head_dim": 256,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
        },
        "gpt_oss": {"head_dim": 64},
        "qwen3": {"head_dim": 128},
        "qwen3_next": {"head_dim": 256, "full_attention_interval": 4},
    }
)
_ATTENTION = frozenset(
    """
    bart cohere deepseek_v2 deepseek_v3 gemma gemma2 gemma3_text gpt2 gpt_neox gpt_oss granite jamba llama mbart mistral
    mixtral mt5 olmo olmo2 olmoe opt phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next smollm3 stablelm starcoder2 t5
    """.split()  # noqa: SIM905 - two dozen words in quotes are not a table that one can read
)
_STATES = frozenset({"mamba", "mamba2", "jamba", "qwen3_next"})
KNOWN_FAMILIES = _ATTENTION | _STATES
"""Values of `model_type` whose caches are known."""
_CROSSING = frozenset({"bart", "mbart", "mt5", "t5"})
# Every layer has the window, if there is one.
_WINDOWED = frozenset({"mistral", "mixtral", "phi3", "starcoder2"})
_FLOAT32 = 4

# Their attention forms all scores; what transformers takes for the others does not.
_SCORING = frozenset({"deepseek_v2", "deepseek_v3", "mt5", "t5"})

_HEADS = ("num_attention_heads", "n_head", "decoder_attention_heads", "num_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_LAYERS = ("num_decoder_layers", "decoder_layers", "num_hidden_layers", "n_layer", "num_layers")


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextShape:
    """What the layers of a model keep of a sequence.

    Attributes:
        family: the `model_type`.
        token_numbers: numbers that a layer with attention keeps of each token.
        row: numbers of a token that are stored next to each other: those of a head.
        full_layers: layers that keep every token.
        window_layers: layers that attend to a window of the last tokens.
        window: tokens of that window.
        cross_layers: layers that keep keys and values of every token of an encoder.
        state_layers: layers that keep a state whose size does not depend on the number of tokens.
        state_numbers: numbers of that state that have the dtype of the model.
        state_bytes: bytes of that state that are in float32 always.
        heads: heads of queries.
        scores: whether the scores of all heads are formed at once.
        width: numbers of a token between layers, or of all its heads, whichever is more.
        inner: numbers of a token within a feed-forward layer, of all its experts.
        experts: experts that are chosen for a token; 1 in other models.
        scan_bytes: bytes of a token that computing a state takes.
        largest: numbers of the largest matrix.
        vocabulary: rows of the token embedding.
    """

    family: str
    token_numbers: int
    row: int
    full_layers: int
    window_layers: int = 0
    window: int = 0
    cross_layers: int = 0
    state_layers: int = 0
    state_numbers: int = 0
    state_bytes: int = 0
    heads: int = 0
    scores: bool = False
    width: int
    inner: int
    experts: int
    scan_bytes: int = 0
    largest: int
    vocabulary: int


def context_shape(settings: Mapping[str, Any]) -> ContextShape:
    """Return what the layers of a model keep of a sequence.

    Args:
        settings: the content of config.json; a model that reads more than text has its decoder's in `text_config`.

    Raises:
        UnsupportedArchitectureError: it is not known for this family, or a field is missing; the message names it.
    """
    inner = settings.get("text_config")
    fields = _Fields(inner if isinstance(inner, Mapping) else settings)
    if fields.family not in KNOWN_FAMILIES:
        raise UnsupportedArchitectureError(
            f"how much memory a model of type {fields.family or 'unknown'} needs for a context is not known; give the "
            "size of its weights instead"
        )
    kinds = _kinds(fields)
    hidden, vocabulary = fields.number(*_HIDDEN), fields.number("vocab_size")
    inner, experts = _inner(fields)
    token_numbers, row = _token_numbers(fields) if kinds.count(_STATE) < len(kinds) else (0, 0)
    window = fields.number("sliding_window") if _WINDOW in kinds else 0
    state_numbers, state_bytes = _state(fields) if _STATE in kinds else (0, 0)
    heads = fields.number(*_HEADS) if row else 0
    return ContextShape(
        family=fields.family,
        token_numbers=token_numbers,
        row=row,
        full_layers=kinds.count(_FULL),
        window_layers=kinds.count(_WINDOW),
        window=window,
        cross_layers=len(kinds) if fields.family in _CROSSING else 0,
        state_layers=kinds.count(_STATE),
        state_numbers=state_numbers,
        state_bytes=state_bytes,
        heads=heads,
        scores=fields.family in _SCORING,
        width=max(hidden, heads * (fields.find("head_dim", "d_kv") or 0)),
        inner=inner,
        experts=experts,
        scan_bytes=_scan_bytes(fields) if _STATE in kinds else 0,
        largest=hidden * max(vocabulary, inner),
        vocabulary=vocabulary,
    )


class _Fields:
    """The fields of a config.json that describes a decoder."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        family = content.get("model_type")
        self.family = family if isinstance(family, str) else ""
        self.content: Mapping[str, Any] = {**_USUAL.get(self.family, {}), **content}

    def find(self, *names: str) -> int | None:
        """Return the first number under one of the names; None if no field has one."""
        values = (self.content.get(name) for name in names)
        return next((value for value in values if type(value) is int and value > 0), None)

    def number(self, *names: str) -> int:
        """Return the same; raise an error if no field has one."""
        value = self.find(*names)
        if value is None:
            raise UnsupportedArchitectureError(
                f"the config.json of this model of type {self.family} has no {' or '.join(names)}, on which the memory "
                "for a context depends; add it, or give the size of its weights instead"
            )
        return value


def _kinds(fields: _Fields) -> Sequence[str]:
    """Return the kind of each layer of the decoder."""
    count = fields.number(*_LAYERS)
    named = fields.content.get("layer_types") or fields.content.get("layers_block_type")
    if isinstance(named, list):
        kinds = [_TYPES.get(name if isinstance(name, str) else None) for name in named]
        if None in kinds or len(kinds) != count:
            raise UnsupportedArchitectureError(
                "layer_types of config.json has a type of layer whose memory for a context is not known, or not one "
                "for each layer; give the size of the weights instead"
            )
        return [kind for kind in kinds if kind is not None]
    return [_kind(fields, layer) for layer in range(count)]


def _kind(fields: _Fields, layer: int) -> str:
    """Return the kind of a layer by the rule of its family."""
    is_full, other = True, _WINDOW
    match fields.family:
        case "mamba" | "mamba2":
            is_full, other = False, _STATE
        case "jamba":
            period, offset = fields.number("attn_layer_period"), fields.find("attn_layer_offset") or 0
            is_full, other = layer % period == offset, _STATE
        case "qwen3_next":
            is_full, other = (layer + 1) % fields.number("full_attention_interval") == 0, _STATE
        case "gemma2" | "gpt_oss":
            is_full = layer % 2 == 1
        case "gemma3_text":
            is_full = (layer + 1) % fields.number("sliding_window_pattern") == 0
        case "qwen2" | "qwen2_moe" | "qwen3" | "qwen3_moe" if fields.content.get("use_sliding_window"):
            is_full = layer < (fields.find("max_window_layers") or 0)
        case family if family in _WINDOWED:
            is_full = fields.find("sliding_window") is None
    return _FULL if is_full else other


def _token_numbers(fields: _Fields) -> tuple[int, int]:
    """Return the numbers that a layer keeps of a token, and those of a row."""
    latent = fields.find("kv_lora_rank")
    if latent is not None:
        return latent + fields.number("qk_rope_head_dim"), latent
    heads = fields.number(*_HEADS)
    row = fields.find("head_dim", "d_kv") or fields.number(*_HIDDEN) // heads
    return 2 * row * (fields.find("num_key_value_heads") or heads), row


def _inner(fields: _Fields) -> tuple[int, int]:
    """Return the numbers of a token within a feed-forward layer, of all experts chosen for it, and their number."""
    usual = fields.find("intermediate_size", "d_ff", "decoder_ffn_dim", "ffn_dim", "n_inner")
    inner = usual or 4 * fields.number(*_HIDDEN)
    experts = fields.find("num_experts_per_tok") or 1
    each = fields.find("moe_intermediate_size") or inner
    shared = fields.find("shared_expert_intermediate_size") or each * (fields.find("n_shared_experts") or 0)
    return max(inner, experts * each + shared), experts


def _state(fields: _Fields) -> tuple[int, int]:
    """Return the numbers of a layer's state in the dtype of the model, and its bytes in float32."""
    if fields.family == "qwen3_next":
        keys, values = fields.number("linear_num_key_heads"), fields.number("linear_num_value_heads")
        key, value = fields.number("linear_key_head_dim"), fields.number("linear_value_head_dim")
        convolution = (2 * keys * key + values * value) * fields.number("linear_conv_kernel_dim")
        return convolution, values * key * value * _FLOAT32
    prefix = "mamba_" if fields.family == "jamba" else ""
    width = fields.number(f"{prefix}expand") * fields.number(*_HIDDEN)
    size = fields.number("mamba_d_state" if prefix else "state_size")
    convolved = width + (2 * fields.number("n_groups") * size if fields.family == "mamba2" else 0)
    return convolved * fields.number("mamba_d_conv" if prefix else "conv_kernel"), width * size * _FLOAT32


def _scan_bytes(fields: _Fields) -> int:
    """Return the bytes of a token that computing a state takes, without kernels for it: as measured, rounded up."""
    match fields.family:
        case "qwen3_next":
            width = fields.number("linear_num_value_heads") * fields.number("linear_value_head_dim")
            return 12 * _FLOAT32 * width
        case "mamba2":
            return 6 * _FLOAT32 * fields.number("num_heads") * (fields.find("chunk_size") or 256)
        case family:
            prefix, size = ("mamba_", "mamba_d_state") if family == "jamba" else ("", "state_size")
            return 4 * _FLOAT32 * fields.number(f"{prefix}expand") * fields.number(*_HIDDEN) * fields.number(size)
