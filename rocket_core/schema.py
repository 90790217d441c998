"""The base class of all models that cross the boundary of a process or a file."""

from pydantic import BaseModel, ConfigDict


class FrozenModel(BaseModel):
    """Immutable values with a fixed set of members.

    The string literal below a field is its description, also in JSON schemas. Infinities and NaN are refused, as JSON
    has neither.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
