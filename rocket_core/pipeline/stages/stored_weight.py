"""Dense weights of layers that a work folder holds in stored form."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rocket_core.checkpoint import TensorEntry
from rocket_core.exports.gguf_blocks import unpack_blocks
from rocket_core.layers import LayerEntry, check_codes, compose_weight, entry_codes, unpack_codes, unpack_coefficients
from rocket_core.linalg.integer_codes import RoundedWeight
from rocket_core.models.architecture import oriented_weight
from rocket_core.pipeline.context import Run
from rocket_core.pipeline.stages.units import CompressionUnit
from rocket_core.pipeline.state.healing_state import HealingState
from rocket_core.pipeline.state.work_folder import WorkFolder
from rocket_core.report.schema import LayerReport
from rocket_core.sizes.block_types import BLOCK_FORMATS, BlockType


def stored_tensors(work: WorkFolder, name: str) -> dict[str, TensorEntry]:
    """Return the locations of a compressed layer's tensors."""
    entries = work.factors(name)
    assert entries is not None, name
    return entries


def trained_entries(work: WorkFolder) -> dict[str, TensorEntry]:
    """Return the locations of trained norms and biases, by the key in the checkpoint that they keep.

    They are those of refined blocks, or of the whole model once it is healed.
    """
    found: dict[str, TensorEntry] = {}
    for index, record in work.refined_blocks().items():
        tensors = work.refined_tensors(index)
        found |= {key: tensors[key] for key in record.vectors.values()}
    healed = HealingState.within(work.path).result()
    return found if healed is None else found | healed[0]


def block_key(block_type: BlockType) -> str:
    """Return the name under which a work folder holds the blocks of a layer."""
    return f"blocks.{block_type}"


def stored_blocks(work: WorkFolder, name: str) -> tuple[BlockType, TensorEntry] | None:
    """Return the block type of a compressed layer and the location of its blocks; None if it is stored otherwise."""
    entries = stored_tensors(work, name)
    found = ((block_type, entries.get(block_key(block_type))) for block_type in BLOCK_FORMATS)
    return next(((block_type, entry) for block_type, entry in found if entry is not None), None)


def read_codes(work: WorkFolder, name: str, shape: tuple[int, int]) -> RoundedWeight:
    """Return codes and scales of a compressed layer that has them, on the CPU.

    Args:
        work: work folder with the layer's tensors.
        name: module name.
        shape: `(d_in, d_out)` of the layer.

    Raises:
        CorruptCheckpointError: the stored tensors are inconsistent.
    """
    tensors = {part: stored.read() for part, stored in stored_tensors(work, name).items()}
    codes = work.codes(name)
    assert codes is not None, name
    return entry_codes(codes, tensors, shape, layer=name)


def read_dense_weight(
    work: WorkFolder,
    name: str,
    shape: tuple[int, int],
    *,
    rank: int | None,
    dictionary_owner: str | None,
    dtype: torch.dtype,
) -> Float[Tensor, "d_out d_in"]:
    """Return the dense weight of a compressed layer, in the orientation of `nn.Linear`, on the CPU.

    Args:
        work: work folder with the layer's tensors.
        name: module name.
        shape: `(d_in, d_out)` of the layer.
        rank: number of atoms; None if the layer is sparse or quantized.
        dictionary_owner: the layer that stores the dictionary, if the dictionary is shared; may be the layer itself.
        dtype: dtype of the result.

    Raises:
        CorruptCheckpointError: the stored tensors are inconsistent.
    """
    blocks = stored_blocks(work, name)
    if blocks is not None:
        block_type, entry = blocks
        return unpack_blocks(entry.read(), block_type).rows(dtype)
    codes = work.codes(name)
    if codes is not None and codes.is_quantized:
        return read_codes(work, name, shape).rows(dtype)
    tensors = {part: stored.read() for part, stored in stored_tensors(work, name).items()}
    d_in, d_out = shape
    values = tensors["weight"]
    if codes is not None:
        assert codes.nnz is not None
        values = _decoded(tensors, "weight", (codes.nnz, 1), codes, codes.scale_exponent, name, dtype).flatten()
    coefficients = unpack_coefficients(
        values, tensors.get("weight_mask"), d_in if rank is None else rank, d_out, layer=name
    )
    if rank is None:
        return compose_weight(None, coefficients, dtype)
    if "weight_u" not in tensors:
        assert dictionary_owner is not None, name
        tensors |= {
            part: stored.read() for part, stored in stored_tensors(work, dictionary_owner).items() if "_u" in part
        }
        owner_codes = work.codes(dictionary_owner)
    else:
        owner_codes = codes
    if owner_codes is None:
        return compose_weight(tensors["weight_u"].T, coefficients, dtype)
    exponent = owner_codes.dictionary_exponent
    atoms = _decoded(tensors, "weight_u", (rank, d_in), owner_codes, exponent, name, dtype)
    return compose_weight(atoms, coefficients, dtype)


def read_layer_weight(work: WorkFolder, layer: LayerReport, dtype: torch.dtype) -> Float[Tensor, "d_out d_in"]:
    """Return the dense weight of a compressed layer of a report; see `read_dense_weight`."""
    return read_dense_weight(
        work,
        layer.name,
        (layer.d_in, layer.d_out),
        rank=layer.rank,
        dictionary_owner=layer.dictionary,
        dtype=dtype,
    )


def install_weight(run: Run, work: WorkFolder, unit: CompressionUnit, name: str, module: nn.Module) -> None:
    """Copy the stored weight of a layer, which is in a unit, into a stock layer."""
    weight = read_dense_weight(
        work,
        name,
        run.architecture.shape(name),
        rank=unit.candidates[unit.names.index(name)].rank,
        dictionary_owner=unit.names[0],
        dtype=run.compute_dtype,
    )
    oriented_weight(module).copy_(weight.T)


def _decoded(
    tensors: dict[str, torch.Tensor],
    part: str,
    shape: tuple[int, int],
    codes: LayerEntry,
    exponent: int | None,
    name: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return numbers that are stored as codes, as the transposed weight that they would be, in the model's dtype."""
    assert exponent is not None
    packed, scales = tensors[part], tensors[f"{part}_scale"]
    check_codes(packed, scales, shape, codes.code_format, name)
    return unpack_codes(packed, scales, shape, codes.code_format, exponent, layer=name).rows(dtype)
