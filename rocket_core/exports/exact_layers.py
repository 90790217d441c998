"""Layers whose equal another engine's format has, as far as the description of a layer tells. Loads no torch.

What depends on the stored numbers themselves, such as whether scales fit into 16 bits, is judged with the weights at
hand (`rocket_core.exports.exact_formats`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rocket_core.engines import ENGINES
from rocket_core.sizes.block_types import BLOCK_FORMATS, BlockFormat, BlockType

# Types with one scale for a block and nothing else, by rising bytes.
PLAIN_TYPES: tuple[BlockType, ...] = ("Q4_0", "Q5_0", "Q8_0")
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that vLLM runs as one, by the ends of their names."""
_WORD_BITS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredForm:
    """How a layer is stored, without its numbers.

    Attributes:
        d_in: input features.
        is_codes: whether the weight itself is made of integer codes.
        is_sparse: whether it is made of coefficients that are the weight itself.
        is_entropy_coded: whether its codes are entropy coded.
        is_table: whether it is a token embedding.
        bits: bits of a code; None if unknown, or it has none.
        group_size: inputs that share a scale; None if unknown, or it has none.
    """

    d_in: int
    is_codes: bool
    is_sparse: bool = False
    is_entropy_coded: bool = False
    is_table: bool = False
    bits: int | None = None
    group_size: int | None = None


def why_not_packed(form: StoredForm) -> str | None:
    """Return why compressed-tensors has no equal of a layer, for vLLM; None if it may have one.

    The reason completes the sentence "its weight ...".
    """
    codes = ENGINES["vllm"].codes
    if not form.is_codes:
        return _not_of_codes(form)
    if form.is_table:
        return "is that of a quantized embedding"
    if form.is_entropy_coded:
        return "is entropy coded"
    if form.bits is not None and form.bits not in codes.bits:
        return f"has codes of {form.bits} bits"
    if form.group_size is None or form.bits is None:
        return None
    size = 0 if form.group_size >= form.d_in else form.group_size
    is_uneven = form.d_in % form.group_size or form.d_in * form.bits % _WORD_BITS
    return _groups(form) if size not in (codes.group_sizes or ()) or is_uneven else None


def why_not_blocks(form: StoredForm) -> str | None:
    """Return why a GGUF file has no equal of a layer, for llama.cpp; None if it may have one.

    The reason completes the sentence "its weight ...".
    """
    if not form.is_codes:
        return _not_of_codes(form)
    if form.group_size is None:
        return None
    is_even = any(_fits(form.d_in, form.group_size, BLOCK_FORMATS[name]) for name in PLAIN_TYPES)
    return None if is_even else _groups(form)


def unlike_neighbour(
    formats: Mapping[str, object], exists: Callable[[str], bool] = lambda _name: True
) -> tuple[str, str] | None:
    """Return two layers that vLLM fuses and that have different formats; None without any.

    Args:
        formats: the format of each stored layer, by its name.
        exists: whether the model has a layer of this name.
    """
    for name, form in formats.items():
        stem, _, last = name.rpartition(".")
        for part in (part for parts in FUSED if last in parts for part in parts if part != last):
            other = f"{stem}.{part}"
            if exists(other) and formats.get(other) != form:
                return name, other
    return None


def no_equals(reasons: Mapping[str, str], count: int) -> str:
    """Return what is said of layers without an equal.

    Args:
        reasons: the reason for each of these layers, by its name; at least one.
        count: number of all stored layers.
    """
    name, reason = next(iter(reasons.items()))
    return f"{len(reasons)} of {count} stored layers have no equal in it, first {name!r}, whose weight {reason}"


def stored_differently(name: str, other: str) -> str:
    """Return what is said of two layers of different formats that vLLM fuses."""
    return f"{name!r} and {other!r} are stored differently, and vLLM fuses them"


def _not_of_codes(form: StoredForm) -> str:
    return "is made of coefficients" if form.is_sparse else "is a product of two factors"


def _groups(form: StoredForm) -> str:
    return f"has scales for groups of {form.group_size} of its {form.d_in} inputs"


def _fits(d_in: int, group_size: int, block_format: BlockFormat) -> bool:
    return block_format.fits(d_in) and (group_size >= d_in or group_size % block_format.block_size == 0)
