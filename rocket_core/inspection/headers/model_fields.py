"""Fields of a model's config.json: read with their types, and compared with the weights. Loads no torch.

A field is rejected only if no model can have its value: a wrong type, or a size far beyond what the checkpoint stores.
transformers builds modules, buffers and lists of these sizes before it reads the first weight.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from rocket_core.config import InputKind
from rocket_core.errors import UnsupportedArchitectureError
from rocket_core.inspection.files.strict_json import is_field_name
from rocket_core.inspection.headers.layer_names import PREFIXES, family_of
from rocket_core.inspection.headers.weight_summary import WeightSummary

# Parts of the names of classes that predict next tokens.
_PREDICTING = ("CausalLM", "LMHead", "DoubleHeads", "ConditionalGeneration", "BertGenerationDecoder")

# These count positions from after the padding token's id, so that some of their position embeddings are never read.
_PADDED_POSITIONS = frozenset(
    """
    camembert data2vec-text ibert layoutlmv3 lilt longformer luke markuplm mpnet roberta roberta-prelayernorm
    xlm-roberta xlm-roberta-xl xmod
    """.split()  # noqa: SIM905 - a dozen words in quotes are not a table that one can read
)

HIDDEN_SIZES = ("hidden_size", "n_embd", "d_model", "dim")
"""Names of the field with the numbers per token between two blocks."""

HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
"""Names of the field with the attention heads of a block."""

POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions", "context_length")
"""Names of the field with the number of tokens that a model can attend to."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")
"""Names of the field with the number of experts in a block."""

_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_top_k", "moe_topk", "moe_k")

_MAX_SIZE = 2**63
# Some models scale the frequencies of their positions for ten million tokens.
_MAX_POSITIONS = 2**26
# transformers creates a name for each.
_MAX_LABELS = 2**17
# As no checkpoint bounds them when config.json is read by itself.
_MAX_LABELS_ALONE = 2**20

# Tolerance for what a family may have beyond the stored weights: omitted towers, settings without effect.
_SPARE_LAYERS = 256
_SPARE_COUNT = 4096
_SPARE_SIZE = 2**16
_SPARE_FACTOR = 4

_MAIN_LAYERS = frozenset(
    {"num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers"}
)
_LAYERS = re.compile(r"(?:\w+_)?(?:layers|layer|depth|depths|blocks|stages|repeats)|block_sizes|attention_types")
_COUNTS = re.compile(r"(?:\w+_)?(?:experts|heads|n_head|codebooks|queries)")
_SIZES = frozenset(
    """
    d_ff d_kv d_model decoder_ffn_dim dim embedding_size encoder_ffn_dim ffn_dim ffn_hidden_size head_dim hidden_dim
    hidden_size intermediate_size kv_lora_rank moe_intermediate_size n_embd n_inner q_lora_rank
    shared_expert_intermediate_size type_vocab_size vocab_size word_embed_proj_dim
    """.split()  # noqa: SIM905 - two dozen words in quotes are not a table that one can read
)
_POSITION_SIZES = frozenset(
    {*POSITIONS, "max_source_positions", "max_seq_len", "max_sequence_length", "n_ctx", "seq_length"}
)
# These fields must be a single integer, because they are read as one.
_INTEGERS = frozenset(
    {*HIDDEN_SIZES, *POSITIONS, *_MAIN_LAYERS, "max_source_positions", "num_channels", "num_mel_bins", "vocab_size"}
)
_SIDES = frozenset({"image_size", "patch_size"})
_FLAGS = frozenset({"is_causal", "is_encoder_decoder"})
_OBJECTS = frozenset({"text_config"})
# Fields that transformers reads from the config of any family, and checks in those families only that declare them.
_WINDOWS = frozenset({"attention_chunk_size", "sliding_window"})
_TOKEN = re.compile(r"\w+_token_id")
# Names and numbers chosen by the author.
_FREE = frozenset({"id2label", "label2id"})
# Suffix of fields that choose an implementation, possibly for each part of the model: these are not sizes.
_CHOICE = "_implementation"
# Families with one row of a stored table for each position.
_TABLE_FAMILIES = frozenset(
    """
    bart bert biogpt camembert distilbert electra gpt2 gpt_bigcode gpt_neo mbart mpnet opt roberta whisper xlm-roberta
    """.split()  # noqa: SIM905 - as above
)
# Families whose stored tables are not vocabulary times hidden size.
_FACTORIZED_FAMILIES = frozenset({"deberta", "deberta-v2", "electra", "opt"})


def find_number(config: Mapping[str, object], names: Iterable[str]) -> int | None:
    """Return the first positive integer under one of the names; None if no field has one.

    A model that reads more than text has its decoder's numbers in `text_config`, which is searched first. DBRX has
    those of its experts in `ffn_config`.
    """
    for part in (config.get("text_config"), config, config.get("ffn_config")):
        for name in names:
            value = part.get(name) if isinstance(part, Mapping) else None
            if isinstance(value, int) and _is_size(value) and value > 0:
                return value
    return None


def active_part(config: Mapping[str, object]) -> float:
    """Return which part of its experts a mixture chooses for a token; 1 for other models, and for unusual fields."""
    experts, chosen = find_number(config, EXPERTS), find_number(config, _CHOSEN)
    return 1.0 if experts is None or chosen is None else min(1.0, chosen / experts)


def problem_with_token(value: object) -> str | None:
    """Return what is wrong with the number of a token, or a list of them; None if nothing. Some models have -1."""
    tokens = value if isinstance(value, list) else [value]
    is_valid = all(type(token) is int and abs(token) < _MAX_SIZE for token in tokens)
    return None if is_valid else "neither the number of a token nor a list of them"


def longer_side(config: Mapping[str, object], name: str) -> int:
    """Return the longer side of an image or patch size in a config; 0 if it has none."""
    value = config.get(name)
    sides = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else [value]
    return max((side for side in sides if isinstance(side, int) and _is_size(side)), default=0)


def check_fields(config: Mapping[str, object], model: str) -> None:
    """Raise an error if a field of a config.json has a value that no model can have, whatever its weights are.

    Args:
        config: the content of config.json.
        model: name of the model in messages.

    Raises:
        UnsupportedArchitectureError: a field is not valid; the message names it.
    """
    for field in _fields(config):
        problem = _problem_with(field)
        if problem is not None:
            raise UnsupportedArchitectureError(
                f"the config.json of {model} has a value of {field.path} that is {problem}; restore the model's "
                "original config.json"
            )


def check_sizes(config: Mapping[str, object], weights: WeightSummary, model: str) -> None:
    """Raise an error if a config.json describes a model far larger than the checkpoint stores.

    The check is exact if the family stores its layers under their own numbers, otherwise tolerant of what a family may
    omit.

    Args:
        config: the content of config.json.
        weights: summary of the safetensors headers.
        model: name of the model in messages.

    Raises:
        UnsupportedArchitectureError: a field is too large; the message names it.
    """
    limits = _Limits.of(config, weights)
    for field in _fields(config):
        most, what = limits.limit_of(field)
        if most is not None and any(value > most for value in field.integers()):
            raise UnsupportedArchitectureError(
                f"the config.json of {model} has a value of {field.path} above {most}, but the weights hold {what}; "
                "restore the config.json that belongs to these weights"
            )
    if not limits.is_exact or family_of(config) in _FACTORIZED_FAMILIES:
        return
    embeddings = (find_number(config, ("vocab_size",)) or 0) * (find_number(config, HIDDEN_SIZES) or 0)
    if embeddings > weights.largest_tensor:
        raise UnsupportedArchitectureError(
            f"the config.json of {model} has values of vocab_size and hidden size for {embeddings} embeddings, but the "
            f"largest tensor holds {weights.largest_tensor} numbers; restore the config.json that belongs to these "
            "weights"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Field:
    """A field of config.json, or of an object in it."""

    name: str
    path: str
    value: object
    holder: Mapping[str, object]
    is_main: bool

    def integers(self) -> Iterator[int]:
        """Yield the integers in the value: itself, or those in its lists and objects."""
        waiting: list[object] = [self.value]
        while waiting:
            value = waiting.pop()
            if type(value) is int:
                yield value
            elif isinstance(value, list | tuple):
                waiting += value
            elif isinstance(value, Mapping):
                waiting += value.values()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Limits:
    """Upper bounds on fields, derived from a checkpoint."""

    blocks: int
    dimension: int
    is_exact: bool
    has_table: bool

    @classmethod
    def of(cls, config: Mapping[str, object], weights: WeightSummary) -> "_Limits":
        lists = Counter(block.rpartition(".")[0] for block in weights.block_parameters)
        family = family_of(config)
        return cls(
            blocks=max(lists.values(), default=0),
            dimension=weights.largest_dimension,
            is_exact=family in PREFIXES,
            has_table=family in _TABLE_FAMILIES,
        )

    def limit_of(self, field: _Field) -> tuple[int | None, str]:
        """Return the upper bound on a field, None if unlimited, and what the bound is derived from."""
        name, is_exact = field.name, self.is_exact and field.is_main
        if _LAYERS.fullmatch(name):
            spare = _SPARE_FACTOR * self.blocks + _SPARE_LAYERS
            return self.blocks if name in _MAIN_LAYERS and is_exact else spare, f"{self.blocks} blocks at most"
        most: int | None = None
        if _COUNTS.fullmatch(name):
            most = max(self.dimension, _SPARE_COUNT)
        elif name == "num_labels":
            most = max(self.dimension, _MAX_LABELS)
        elif (is_exact and name in (*HIDDEN_SIZES, "vocab_size")) or (self.has_table and name in _POSITION_SIZES):
            most = self.dimension
        elif name in _SIZES:
            most = _SPARE_FACTOR * self.dimension + _SPARE_SIZE
        return most, f"no dimension above {self.dimension}"


def _fields(config: Mapping[str, object]) -> Iterator[_Field]:
    """Yield the named fields of config.json and of all objects in it, without recursion."""
    waiting: list[tuple[Mapping[str, object], str, bool]] = [(config, "", True)]
    while waiting:
        part, prefix, is_main = waiting.pop()
        for name, value in part.items():
            if not isinstance(name, str) or not is_field_name(name) or name in _FREE or name.endswith(_CHOICE):
                continue
            yield _Field(name=name, path=prefix + name, value=value, holder=part, is_main=is_main)
            inner = f"{name}."
            if isinstance(value, Mapping):
                waiting.append((value, inner, is_main and name == "text_config"))
            elif isinstance(value, list | tuple):
                waiting += [(item, inner, False) for item in value if isinstance(item, Mapping)]


def _problem_with(field: _Field) -> str | None:
    name, value, problem = field.name, field.value, None
    if value is None:
        return None
    if name in _OBJECTS and not isinstance(value, Mapping):
        problem = "not an object"
    elif name in _FLAGS and not isinstance(value, bool):
        problem = "neither true nor false"
    elif name in _SIDES:
        problem = _problem_with_side(value)
    elif name in _WINDOWS and field.is_main:
        # Families that may leave the window out have 0 then.
        is_used = field.holder.get("use_sliding_window") is not False
        problem = None if _is_size(value) and (value or not is_used) else "not a number of tokens, at least 1"
    elif name == "kv_sharing_modes":
        problem = "no setting of a model: transformers computes it"
    elif name == "num_labels" and any(count > _MAX_LABELS_ALONE for count in field.integers()):
        problem = "out of range"
    elif _TOKEN.fullmatch(name):
        problem = problem_with_token(value)
    elif name in _INTEGERS:
        problem = _problem_with_integer(field, value)
    elif _is_limited(name):
        least = 0 if _COUNTS.fullmatch(name) else 1 - _MAX_SIZE
        problem = None if all(least <= size < _MAX_SIZE for size in field.integers()) else "out of range"
    return problem


def _is_limited(name: str) -> bool:
    return name in _SIZES or name in _POSITION_SIZES or bool(_LAYERS.fullmatch(name) or _COUNTS.fullmatch(name))


def _problem_with_integer(field: _Field, value: object) -> str | None:
    # Some tools write a whole number as a float, and nested models have lists for some of these names.
    if not field.is_main or (field.name in _MAIN_LAYERS and isinstance(value, list | Mapping)):
        sizes = list(field.integers())
    elif isinstance(value, float) and value.is_integer():
        sizes = [int(value)]
    elif type(value) is int:
        sizes = [value]
    else:
        return "not an integer"
    most = _MAX_POSITIONS if field.name in _POSITION_SIZES else _MAX_SIZE - 1
    return None if all(0 <= size <= most for size in sizes) else "out of range"


def _problem_with_side(value: object) -> str | None:
    sides = list(value.values()) if isinstance(value, Mapping) else value if isinstance(value, list) else [value]
    if not all(isinstance(side, int | float | list | str | None) for side in sides):
        return "not an integer, list of integers or object of integers"
    if isinstance(value, str | bool):
        return "not an integer, list of integers or object of integers"
    numbers = [side for side in sides if isinstance(side, int | float)]
    return None if all(0 <= side < _MAX_POSITIONS for side in numbers) else "out of range"


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < _MAX_SIZE


def positions(config: Mapping[str, object]) -> int | None:
    """Return the number of text tokens that a model can attend to; None if its config.json does not say."""
    table = find_number(config, POSITIONS)
    if table is None or family_of(config) not in _PADDED_POSITIONS:
        return table
    padding = config.get("pad_token_id", 1)
    return table - 1 - (padding if type(padding) is int and 0 <= padding < table else 1)


def sample_positions(config: Mapping[str, object], kind: InputKind, sequence_length: int) -> int:
    """Return the positions of a calibration sample whose hidden states are held, summed over all lists of blocks.

    Args:
        config: the content of config.json.
        kind: what the model reads.
        sequence_length: tokens per window of text.
    """
    if kind == "images":
        image, patch = (longer_side(config, name) for name in ("image_size", "patch_size"))
        return (image // patch) ** 2 + 1 if image and patch else sequence_length
    if kind == "audio":
        return sequence_length + (find_number(config, ("max_source_positions",)) or 0)
    return 2 * sequence_length if config.get("is_encoder_decoder") else sequence_length


def input_bytes(config: Mapping[str, object], kind: InputKind) -> int:
    """Return the bytes of one image, or one window of audio, as a model reads it; 0 for text, whose tokens are few."""
    if kind == "images":
        return 4 * (find_number(config, ("num_channels",)) or 3) * longer_side(config, "image_size") ** 2
    if kind == "audio":
        # A convolution halves the number of frames.
        frames = 2 * (find_number(config, ("max_source_positions",)) or 0)
        return 4 * frames * (find_number(config, ("num_mel_bins",)) or 0)
    return 0


def input_kind(config: Mapping[str, object]) -> InputKind:
    """Return what a model reads, as far as config.json shows it; a run takes it from the model itself."""
    if "num_mel_bins" in config:
        return "audio"
    return "images" if "patch_size" in config and "vocab_size" not in config else "text"


def named_classes(config: Mapping[str, object]) -> list[str]:
    """Return the names of the classes that can load a model, as far as config.json names them."""
    named = config.get("architectures")
    return [name for name in named if isinstance(name, str)] if isinstance(named, list) else []


def predicts_tokens(config: Mapping[str, object]) -> bool:
    """Return whether a model predicts next tokens, as far as config.json shows it; True if it names no class."""
    classes = named_classes(config)
    predicts = any(mark in name for name in classes for mark in _PREDICTING) and not config.get("is_encoder_decoder")
    return input_kind(config) == "text" and (predicts or not classes)
