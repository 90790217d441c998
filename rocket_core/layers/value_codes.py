"""Kept numbers of a layer in fewer bits: coefficients and atoms as integer codes."""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from rocket_core.layers.factors import LayerFactors
from rocket_core.layers.layer_table import LayerEntry
from rocket_core.linalg.integer_codes import RoundedWeight, search_scales
from rocket_core.linalg.rounding import round_to_nearest
from rocket_core.sizes.code_format import value_format


def round_values(factors: LayerFactors, bits: int, widths: tuple[int, ...]) -> LayerFactors:
    """Round the stored numbers of layers to the nearest integer codes; which are stored does not change.

    Every scale is the one with the least squared error of its group. Atoms are in groups by input, because their
    entries for an input are of similar size, and those for two inputs are not: D is S⁻¹ times orthonormal columns.

    Args:
        factors: factors of a layer, or of all that share a dictionary, concatenated.
        bits: 4 or 8.
        widths: outputs of each of these layers.

    Returns:
        The numbers that are represented, with their codes.
    """
    dictionary, atoms = factors.dictionary, None
    if dictionary is not None:
        atoms = _nearest(dictionary.T, bits)
        dictionary = atoms.weight(dictionary.dtype).T
    coefficients = torch.zeros_like(factors.coefficients)
    values: list[RoundedWeight] = []
    begin = 0
    for width in widths:
        part = slice(begin, begin + width)
        begin = part.stop
        rows = factors.coefficients[:, part].T
        stored = torch.ones_like(rows, dtype=torch.bool) if factors.support is None else factors.support[:, part].T
        values.append(_nearest(rows[stored][:, None], bits))
        rounded = torch.zeros_like(rows)
        rounded[stored] = values[-1].rows(rows.dtype)[0]
        coefficients[:, part] = rounded.T
    return replace(
        factors, dictionary=dictionary, coefficients=coefficients, value_codes=tuple(values), dictionary_codes=atoms
    )


def coded_entry(factors: LayerFactors) -> LayerEntry:
    """Return the entry in the table of a layer whose numbers are codes; its dictionary owner is a module name."""
    [values] = factors.value_codes
    scales, atoms = values.scales, factors.dictionary_codes
    own = factors.dictionary_owner is None and atoms is not None
    return LayerEntry(
        rank=None if factors.dictionary is None else factors.dictionary.shape[1],
        nnz=factors.nnz,
        dictionary=factors.dictionary_owner,
        bits=scales.format.bits,
        group_size=scales.format.group_size,
        scale_bits=scales.format.scale_bits,
        scale_exponent=scales.exponent,
        dictionary_exponent=atoms.scales.exponent if own and atoms is not None else None,
    )


def _nearest(weight: Float[Tensor, "d_in d_out"], bits: int) -> RoundedWeight:
    scales = search_scales(weight, torch.ones_like(weight[:, 0]), value_format(bits))
    return round_to_nearest(weight, scales)
