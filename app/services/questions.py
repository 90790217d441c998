"""Messages between the service and the processes that read untrusted files.

The files may have compromised the process that sends an answer, so answers are limited in size and validated with
these models, like a client's request.
"""

from collections.abc import Mapping
from typing import Annotated

from pydantic import ConfigDict, Field, field_validator, model_validator

from app.shared.errors import AppError, OverQuotaError
from app.shared.requests import JobRequest
from rocket_core import errors
from rocket_core.errors import InfeasibleBudgetError, RocketError, UnmatchedIgnoreError
from rocket_core.schema import FrozenModel
from rocket_core.sizes.memory_fit import FittedMemory

# A request's body is far smaller; most of an answer is its message.
MAX_QUESTION_BYTES = 2**22
MAX_ANSWER_BYTES = 2**16
_MAX_MESSAGE = 2000
MAX_WARNINGS = 4
NOT_CONFINED = 70
"""Exit code of a process that could not be set up, which the model cannot have caused."""

# More than any model has, and few enough digits to print.
_Count = Annotated[int, Field(ge=0, lt=2**128)]
_Amount = Annotated[float, Field(ge=0, lt=2.0**128)]
# A bound within the pattern would take 11 MB: it is compiled for each number of characters.
_Place = Annotated[str, Field(pattern=r"^[\w.: -]+$", max_length=120)]


def _kinds() -> dict[str, type[RocketError | AppError]]:
    known: dict[str, type[RocketError | AppError]] = {OverQuotaError.code: OverQuotaError}
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, RocketError):
            known[kind.code] = kind
    return known


_KINDS = _kinds()


class _Message(FrozenModel):
    model_config = ConfigDict(hide_input_in_errors=True)


class HubQuestion(_Message):
    """Settings for queries to the Hub."""

    token: str | None = Field(repr=False)
    """token for the Hub; None for anonymous access."""
    endpoint: str
    is_offline: bool
    """whether the operator forbids access to the Hub."""
    seconds: float
    """time limit for all queries together."""
    proxies: Mapping[str, str] = Field(repr=False)
    """environment variables that name proxies."""


class Question(_Message):
    """A request to judge."""

    request: JobRequest
    dataset: str
    """the calibration dataset, as the library takes it."""
    folder: str | None
    """folder of a local model, without symbolic links; None for a model on the Hub."""
    hub: HubQuestion | None
    """settings for the Hub; None for a local model."""
    model_bytes: int | None
    """upper bound on the tenant's models; None for no limit."""
    is_estimate: bool
    """whether an estimate is requested."""
    requires_isolation: bool
    """whether the process must end if the system does not confine it in every part."""
    lacks_data: bool = False
    """whether the model is judged alone, before there is a job with calibration data."""

    @model_validator(mode="after")
    def _one_source(self) -> "Question":
        if (self.folder is None) == (self.hub is None):
            raise ValueError("a model is either in a folder or on the Hub")
        return self


class Operations(_Message):
    """What the time of a job depends on; see `rocket_core.estimates.duration.Operations`."""

    products: _Amount
    rough_products: _Amount
    memory: _Amount
    seconds: _Amount


class Figures(_Message):
    """The estimated resources of a job; see `app.services.estimates.Estimate`."""

    commit: Annotated[str, Field(max_length=200)] | None
    parameters: _Count
    stored_bytes: _Count
    compressible_parameters: _Count
    kept_parameters: _Count
    factored_bytes: _Count
    ratio: float
    nearest_ratio: float
    calibration_tokens: _Count
    memory_bytes: _Count
    disk_bytes: _Count
    selected_bytes: _Count
    operations: Operations | None = None
    fit: FittedMemory | None = None
    why_no_time: Annotated[str, Field(max_length=_MAX_MESSAGE)] | None = None


class Judged(_Message):
    """What is known of an admissible request."""

    warnings: Annotated[tuple[Annotated[str, Field(max_length=_MAX_MESSAGE)], ...], Field(max_length=MAX_WARNINGS)] = ()
    """what its client should know, such as that little of the model is selected; empty if the weights are not known."""
    figures: Figures | None = None
    """the estimate; None where none was requested, or the weights are not known."""


class Refusal(_Message):
    """An error of this service or its library, as a message."""

    code: str
    message: Annotated[str, Field(max_length=_MAX_MESSAGE)]
    param: Annotated[str, Field(max_length=100)] | None = None
    """the invalid member of the request."""
    position: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """index of the invalid ignore pattern."""
    nearest_ratio: float | None = None
    """the nearest reachable ratio."""

    @field_validator("code")
    @classmethod
    def _is_known(cls, code: str) -> str:
        if code not in _KINDS:
            raise ValueError("no code of an error")
        return code

    @classmethod
    def of(cls, error: RocketError | AppError) -> "Refusal":
        """Return the message for an error; text that is too long is truncated."""
        message = str(error)
        return cls(
            code=error.code,
            message=message if len(message) <= _MAX_MESSAGE else message[: _MAX_MESSAGE - 3] + "...",
            param=getattr(error, "param", None),
            position=getattr(error, "position", None),
            nearest_ratio=getattr(error, "nearest_ratio", None),
        )

    def error(self) -> RocketError | AppError:
        """Return the error, of the same class and with the same attributes."""
        kind = _KINDS[self.code]
        if kind is UnmatchedIgnoreError:
            return UnmatchedIgnoreError(self.message, position=self.position or 0)
        if kind is InfeasibleBudgetError:
            return InfeasibleBudgetError(self.message, nearest_ratio=self.nearest_ratio or 0.0)
        if kind is OverQuotaError:
            return OverQuotaError(self.message, param=self.param)
        return kind(self.message)


class Answer(_Message):
    """The answer to a question."""

    judged: Judged = Judged()
    refusal: Refusal | None = None
    """why the request cannot be carried out; None if it can."""
    fault: Annotated[tuple[_Place, ...], Field(max_length=20)] = ()
    """an unexpected error: its class and its places in the code; empty if none occurred."""
