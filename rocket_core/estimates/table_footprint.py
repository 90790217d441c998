"""Memory and disk needed to quantize token embedding and head. Loads no torch."""

OUTPUTS_AT_ONCE = 2**14
"""Outputs that are rounded at once: more, as those of a large vocabulary, would only take memory."""

_FLOAT64 = 8
# Matrices of a weight's size that rounding holds: weight, steps, codes, slopes, errors, and candidates of each.
_ROUNDING_COPIES = 12
# Bytes on disk of a code of at most 8 bits, with its part of a scale.
_CODE_BYTES = 2
# Bytes of memory for each code: itself, and copies while it is packed or unpacked.
_CODE_BYTES_IN_MEMORY = 8
# The matrix itself, damped, in order and inverted.
_GRAM_COPIES = 4


def table_memory_bytes(parameters: int, hidden_size: int, *, compute_itemsize: int, itemsize: int) -> int:
    """Return the memory to quantize a table: dense, as codes, with some outputs being rounded.

    Args:
        parameters: parameters of the table; those of everything outside the blocks are an upper bound.
        hidden_size: inputs of the table.
        compute_itemsize: bytes of a number of the model in memory.
        itemsize: bytes of a number while rounding.
    """
    rounding = min(parameters, OUTPUTS_AT_ONCE * hidden_size) * _ROUNDING_COPIES * itemsize
    grams = _GRAM_COPIES * hidden_size**2 * _FLOAT64
    return parameters * (compute_itemsize + _CODE_BYTES_IN_MEMORY) + rounding + grams


def table_disk_bytes(parameters: int, hidden_size: int) -> int:
    """Return the disk for the codes of all tables, and the Gram matrices of two; the arguments are as above."""
    return parameters * _CODE_BYTES + 2 * hidden_size**2 * _FLOAT64
