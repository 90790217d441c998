"""Results of profiling a layer: the ways to store it, each with its size and error."""

from typing import Annotated, Literal

from pydantic import Field

from rocket_core.schema import FrozenModel
from rocket_core.sizes.block_types import BlockType
from rocket_core.sizes.code_format import CodeBits, CodeFormat, ScaleBits

CandidateKind = Literal["dense", "low_rank", "factored", "sparse", "quantized", "entropy_coded"]

CODE_KINDS: frozenset[CandidateKind] = frozenset({"quantized", "entropy_coded"})
"""Kinds that keep every weight, as an integer code."""

FACTOR_NAMES = ("weight", "weight_mask", "weight_u")
"""Names of the tensors that may replace the weight of a layer stored as factors, to be appended to its name and a dot.
"""
CODED_FACTOR_NAMES = (*FACTOR_NAMES, "weight_scale", "weight_u_scale")
"""Names of the tensors that may replace the weight of a layer stored as factors whose numbers are codes."""
PACKED_NAMES = ("weight_packed", "weight_scale", "weight_shape")
"""Names of the tensors that replace the weight of a layer in a file of compressed-tensors."""

_Count = Annotated[int, Field(ge=0)]
_Error = Annotated[float, Field(ge=0)]


class Candidate(FrozenModel):
    """One way to store a layer."""

    kind: CandidateKind
    """`dense` (the layer as it is), `low_rank` (two dense factors), `factored` (dictionary times sparse coefficients),
    `sparse` (the weight with many entries zero), `quantized` (integer codes of a few bits, with scales) or
    `entropy_coded` (integer codes in as many bits as their distribution needs, with a scale for each output).
    """
    rank: Annotated[int, Field(ge=1)] | None = None
    """number of atoms; None unless low-rank or factored."""
    nnz: Annotated[int, Field(ge=1)] | None = None
    """nonzero coefficients, or nonzero weights if sparse; None if dense or of codes."""
    dictionary: str | None = None
    """the layer whose dictionary this one uses, itself if it owns a shared one; None if not shared."""
    bits: CodeBits | None = None
    """bits of a code; None unless quantized, or low-rank with factors of codes, as for the two fields below."""
    group_size: Annotated[int, Field(ge=1)] | None = None
    """inputs that share a scale."""
    scale_bits: ScaleBits | None = None
    """bits of a scale."""
    block_type: BlockType | None = None
    """block type of llama.cpp, MLX or a GPU, instead of bits, size of groups and bits of scales; otherwise None."""
    kept_parameters: _Count
    """`rank * d_in + nnz`, `d_in * d_out` if dense or of codes, `nnz` if sparse; `nnz` alone where the dictionary
    belongs to another layer.
    """
    stored_bytes: _Count
    """bytes on disk, masks included, bias excluded; at most, if entropy coded."""
    reconstruction_error: _Error
    """‖S(W - W̃)‖ / ‖SW‖, the relative error of the layer's output over the calibration tokens; 0 if dense. With column
    weights both norms are weighted by the sensitivity of each output.
    """
    weight_error: _Error
    """‖W - W̃‖ / ‖W‖, the relative error in the original space (or another metric, if configured); 0 if dense. Weighted
    in the same way.
    """
    loss: _Error | None = None
    """expected increase of the model's loss, nats per token; with the objective `prior`, the squared relative error of
    the weight times the layer's share; 0 if dense, None if sensitivities were not measured.
    """

    @property
    def code_format(self) -> CodeFormat:
        """The format of codes."""
        assert self.bits is not None
        assert self.group_size is not None
        assert self.scale_bits is not None
        return CodeFormat(bits=self.bits, group_size=self.group_size, scale_bits=self.scale_bits)


class SharedCandidate(FrozenModel):
    """One way to store all layers of an input group together: one dictionary, and each layer's own coefficients."""

    members: Annotated[tuple[Candidate, ...], Field(min_length=2)]
    """how each layer of the group is stored, in the group's order; the first owns the dictionary."""

    @property
    def kind(self) -> CandidateKind:
        """Kind of all members."""
        return self.members[0].kind

    @property
    def rank(self) -> int | None:
        """Rank of the shared dictionary."""
        return self.members[0].rank

    @property
    def nnz(self) -> int:
        """Nonzero coefficients of all members together."""
        return sum(member.nnz or 0 for member in self.members)

    @property
    def kept_parameters(self) -> int:
        """Kept parameters of all members together."""
        return sum(member.kept_parameters for member in self.members)

    @property
    def stored_bytes(self) -> int:
        """Bytes on disk of all members together."""
        return sum(member.stored_bytes for member in self.members)


class LayerProfile(FrozenModel):
    """The candidates of one layer."""

    name: str
    """module name within the model."""
    d_in: Annotated[int, Field(ge=1)]
    """input features."""
    d_out: Annotated[int, Field(ge=1)]
    """output features."""
    input_group: str
    """name of the first layer that reads the same input; a layer that shares no input is its own group."""
    tokens: Annotated[int, Field(ge=1)]
    """number of calibration tokens in the Gram matrix; 1 without calibration."""
    routed_tokens: _Count | None = None
    """those that a router sent to this expert of a mixture, the others being an average of its block's; None for layers
    that read all tokens.
    """
    candidates: Annotated[tuple[Candidate, ...], Field(min_length=1)]
    """the dense candidate first, then by kind and falling kept parameters."""
    shared: tuple[SharedCandidate, ...] = ()
    """ways to store the whole group together; only set for the group's first layer."""

    @property
    def parameters(self) -> int:
        """Parameters of the dense weight."""
        return self.d_in * self.d_out


class FormatGroup(FrozenModel):
    """Layers that an engine needs stored in the same way."""

    layers: Annotated[tuple[str, ...], Field(min_length=1)]
    """their names."""
    dense: bool = True
    """whether they may stay dense."""


class FrontierPoint(FrozenModel):
    """A candidate worth considering: none of the layer's others is both smaller and better."""

    kind: CandidateKind
    """dense, low_rank, factored, sparse, quantized or entropy_coded."""
    shared: bool
    """whether it covers the whole input group."""
    cost: int
    """kept parameters or stored bytes, whichever the budget counts."""
    error: float
    """contribution to the objective."""


class SizePoint(FrozenModel):
    """A whole model at one ratio, as predicted from its profiles."""

    ratio: Annotated[float, Field(ge=0, lt=1)]
    """target compression ratio."""
    kept_parameters: _Count
    """kept parameters of all compressible layers."""
    stored_bytes: _Count
    """bytes on disk of all compressible layers, masks included."""
    error: _Error
    """sum of the objective over the layers."""
