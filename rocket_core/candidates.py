"""Results of profiling a layer: the ways to store it, each with its size and error."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from rocket_core.schema import described

CandidateKind = Literal["dense", "low_rank", "factored", "sparse"]

_Count = Annotated[int, Field(ge=0)]
_Error = Annotated[float, Field(ge=0)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, json_schema_extra=described)


class Candidate(_Frozen):
    """One way to store a layer.

    Attributes:
        kind: `dense` (the layer as it is), `low_rank` (two dense factors), `factored` (dictionary times sparse
            coefficients) or `sparse` (the weight with most entries zero).
        rank: number of atoms; None if dense or sparse.
        nnz: nonzero coefficients, or nonzero weights if sparse; None if dense.
        dictionary: the layer whose dictionary this one uses, itself if it owns a shared one; None if not shared.
        kept_parameters: `rank * d_in + nnz`, `d_in * d_out` if dense, `nnz` if sparse; `nnz` alone where the
            dictionary belongs to another layer.
        stored_bytes: bytes on disk, masks included, bias excluded.
        reconstruction_error: ‖S(W - W̃)‖ / ‖SW‖, the relative error of the layer's output over the calibration
            tokens; 0 if dense. With column weights both norms are weighted by the sensitivity of each output.
        weight_error: ‖W - W̃‖ / ‖W‖, the relative error in the original space (or another metric, if configured);
            0 if dense. Weighted in the same way.
        loss: expected increase of the model's loss, nats per token; 0 if dense, None if sensitivities were not
            measured.
    """

    kind: CandidateKind
    rank: Annotated[int, Field(ge=1)] | None = None
    nnz: Annotated[int, Field(ge=1)] | None = None
    dictionary: str | None = None
    kept_parameters: _Count
    stored_bytes: _Count
    reconstruction_error: _Error
    weight_error: _Error
    loss: _Error | None = None


class SharedCandidate(_Frozen):
    """One way to store all layers of an input group together: one dictionary, and each layer's own coefficients.

    Attributes:
        members: how each layer of the group is stored, in the group's order; the first owns the dictionary.
    """

    members: Annotated[tuple[Candidate, ...], Field(min_length=2)]

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


class LayerProfile(_Frozen):
    """The candidates of one layer.

    Attributes:
        name: module name within the model.
        d_in: input features.
        d_out: output features.
        input_group: name of the first layer that reads the same input; a layer that shares no input is its own group.
        tokens: number of calibration tokens in the Gram matrix.
        candidates: the dense candidate first, then by kind and falling kept parameters.
        shared: ways to store the whole group together; only set for the group's first layer.
    """

    name: str
    d_in: Annotated[int, Field(ge=1)]
    d_out: Annotated[int, Field(ge=1)]
    input_group: str
    tokens: Annotated[int, Field(ge=1)]
    candidates: Annotated[tuple[Candidate, ...], Field(min_length=1)]
    shared: tuple[SharedCandidate, ...] = ()

    @property
    def parameters(self) -> int:
        """Parameters of the dense weight."""
        return self.d_in * self.d_out


class FrontierPoint(_Frozen):
    """A candidate worth considering: none of the layer's others is both smaller and better.

    Attributes:
        kind: dense, low_rank, factored or sparse.
        shared: whether it covers the whole input group.
        cost: kept parameters or stored bytes, whichever the budget counts.
        error: contribution to the objective.
    """

    kind: CandidateKind
    shared: bool
    cost: int
    error: float


class SizePoint(_Frozen):
    """A whole model at one ratio, as predicted from its profiles.

    Attributes:
        ratio: target compression ratio.
        kept_parameters: kept parameters of all compressible layers.
        stored_bytes: bytes on disk of all compressible layers, masks included.
        error: sum of the objective over the layers.
    """

    ratio: Annotated[float, Field(ge=0, lt=1)]
    kept_parameters: _Count
    stored_bytes: _Count
    error: _Error
