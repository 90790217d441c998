"""What profiling finds out about a layer: the ways to store it, each with its size and its error."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

CandidateKind = Literal["dense", "low_rank", "factored", "sparse"]

_Count = Annotated[int, Field(ge=0)]
_Error = Annotated[float, Field(ge=0)]


class Candidate(BaseModel):
    """One way to store a layer.

    Attributes:
        kind: `dense` (the layer as it is), `low_rank` (dictionary times coefficients without zeros), `factored`
            (dictionary times sparse coefficients) or `sparse` (the weight itself, with zeros).
        rank: number of atoms; None if dense or sparse.
        nnz: nonzero coefficients; None if dense.
        kept_parameters: `rank * d_in + nnz`, `nnz` if sparse, or `d_in * d_out` if dense.
        stored_bytes: bytes on disk, masks included, bias excluded.
        reconstruction_error: ‖S(W - W̃)‖ / ‖SW‖, the relative error of the layer's output over the calibration
            tokens; 0 if dense.
        weight_error: ‖W - W̃‖ / ‖W‖, the relative error in the original space; 0 if dense.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: CandidateKind
    rank: Annotated[int, Field(ge=1)] | None = None
    nnz: Annotated[int, Field(ge=1)] | None = None
    kept_parameters: _Count
    stored_bytes: _Count
    reconstruction_error: _Error
    weight_error: _Error


class LayerProfile(BaseModel):
    """The candidates of one layer.

    Attributes:
        name: module name within the model.
        d_in: input features.
        d_out: output features.
        input_group: name of the first layer that reads the same input; a layer alone is its own group.
        tokens: calibration tokens behind the Gram matrix.
        candidates: the dense candidate first, then by falling kept parameters.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str
    d_in: Annotated[int, Field(ge=1)]
    d_out: Annotated[int, Field(ge=1)]
    input_group: str
    tokens: Annotated[int, Field(ge=1)]
    candidates: Annotated[tuple[Candidate, ...], Field(min_length=1)]

    @property
    def parameters(self) -> int:
        """Parameters of the dense weight."""
        return self.d_in * self.d_out
