"""Layers, token embedding and head of a model, as its config.json and headers show them. Loads no torch."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rocket_core.errors import InvalidConfigError, UnsupportedArchitectureError
from rocket_core.inspection.files.safetensors_headers import FLOAT_DTYPES
from rocket_core.inspection.headers.block_lists import block_of, compressed_lists, list_of
from rocket_core.inspection.headers.expert_stacks import expert_layers, joined_stacks
from rocket_core.inspection.headers.layer_names import (
    PREFIXES,
    family_of,
    is_costly,
    last_part,
    name_matcher,
    possible_names,
    possible_table_names,
)
from rocket_core.inspection.headers.model_fields import EXPERTS, HIDDEN_SIZES, find_number, named_classes
from rocket_core.inspection.headers.weight_summary import WeightSummary
from rocket_core.sizes.budget import Shape

_WEIGHT = ".weight"
# Matrices in blocks that are lookup tables, by the last part of their names.
_NO_LAYERS = frozenset({"relative_attention_bias"})
# Classes with a head that predicts tokens, by the ends of their names.
_PREDICTING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
# These store a weight as `(d_in, d_out)`; all other families store the transpose.
_CONV1D_FAMILIES = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer"})


@dataclass(frozen=True, kw_only=True, slots=True)
class HeaderTables:
    """Matrices that may be token embedding or head.

    Attributes:
        shapes: `(d_in, d_out)` by name.
        are_known: whether each of them is one that can be quantized.
        is_family_known: whether these are all that may be, each with a row for every token.
    """

    shapes: Mapping[str, Shape]
    are_known: bool
    is_family_known: bool = True


def find_layers(
    config: Mapping[str, object], weights: WeightSummary, *, ignore: Sequence[str] = (), vision: bool = False
) -> dict[str, list[tuple[str, Shape]]]:
    """Return name and `(d_in, d_out)` of the selected layers of each block; see `footprint.describe_model`.

    Args:
        config: the content of config.json.
        weights: summary of the safetensors headers.
        ignore: glob patterns of layers to leave alone.
        vision: whether the layers in the blocks of a tower of images are selected as well.

    Raises:
        UnsupportedArchitectureError: no layer is left to compress.
        InvalidConfigError: matching the patterns with the names would take too much work.
    """
    lists = compressed_lists(config, weights)
    selected = compressed_lists(config, weights, vision=vision)
    if is_costly((name for name, _ in weights.matrices), ignore):
        raise InvalidConfigError(
            f"the ignore patterns are too long for a model of {len(weights.matrices)} layers; use fewer or shorter ones"
        )
    is_ignored = name_matcher(ignore)
    layers: dict[str, list[tuple[str, Shape]]] = {}
    turned = family_of(config) in _CONV1D_FAMILIES
    for name, (rows, columns) in weights.matrices:
        member = block_of(name)
        if list_of(member) not in selected or last_part(name.removeprefix(member)) in _NO_LAYERS:
            continue
        if not is_ignored(possible_names(config, name)):
            layers.setdefault(member, []).append((name, (rows, columns) if turned else (columns, rows)))
    hidden_size = find_number(config, HIDDEN_SIZES) or 0
    for name, stack in (*weights.stacks, *joined_stacks(weights.others, find_number(config, EXPERTS))):
        for layer, shape in expert_layers(name, stack, hidden_size) if list_of(block_of(name)) in lists else ():
            if not is_ignored(possible_names(config, layer)):
                layers.setdefault(block_of(name), []).append((layer, shape))
    if not layers:
        raise UnsupportedArchitectureError("no layer of the model is left to compress; ignore fewer of them")
    return layers


def find_tables(config: Mapping[str, object], weights: WeightSummary, *, ignore: Sequence[str] = ()) -> HeaderTables:
    """Return the matrices that may be token embedding or head, without the ignored ones.

    Args:
        config: the content of config.json.
        weights: summary of the safetensors headers.
        ignore: glob patterns of layers to leave alone.
    """
    is_family_known = family_of(config) in PREFIXES
    outside = {
        other.key.removesuffix(_WEIGHT): (other.shape[1], other.shape[0])
        for other in weights.others
        if len(other.shape) == 2 and other.nbytes and other.dtype in FLOAT_DTYPES
    }
    if not is_family_known:
        lists = compressed_lists(config, weights)
        inside = {name: shape for name, shape in weights.matrices if list_of(block_of(name)) not in lists}
        return HeaderTables(shapes=outside | inside, are_known=False, is_family_known=False)
    named = possible_table_names(config)
    is_ignored = name_matcher(ignore)
    found = {name: shape for name, shape in outside.items() if name in named}
    kept = {
        name: shape for name, shape in found.items() if not is_ignored((*possible_names(config, name), last_part(name)))
    }
    # A pattern may name a tied head, which is not stored.
    return HeaderTables(shapes=kept, are_known=not is_ignored(named) and _all_quantizable(config, found))


def likely_tables(
    config: Mapping[str, object], weights: WeightSummary, *, ignore: Sequence[str] = ()
) -> tuple[Shape, ...]:
    """Return the shapes of what seems to be token embedding and head: in other families, what has a row for each token.

    The arguments are those of `find_tables`.
    """
    found = find_tables(config, weights, ignore=ignore)
    rows = None if found.is_family_known else find_number(config, ("vocab_size",))
    return tuple((d_in, d_out) for d_in, d_out in found.shapes.values() if rows is None or d_out == rows)


def _all_quantizable(config: Mapping[str, object], tables: Collection[str]) -> bool:
    """Return whether all stored tables of a known family can be quantized: one, or two that are not meant to be tied.

    A table that is stored twice although it is tied stays dense. The configuration of T5 ties its two in any case, and
    the checkpoint tells whether they are.
    """
    if len(tables) <= 1:
        return True
    predicts = any(name.endswith(_PREDICTING) for name in named_classes(config))
    of_pair = config.get("is_encoder_decoder") is True and {last_part(name) for name in tables} == {"shared", "lm_head"}
    return len(tables) == 2 and predicts and (of_pair or config.get("tie_word_embeddings") is False)
