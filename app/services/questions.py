"""What the service asks a process that reads strangers' files, and what that process may answer.

An answer comes from a process that may have been taken over by what it read: it is limited in size and checked against
these models like a request of a client.
"""

from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from app.shared.errors import AppError, OverQuotaError
from app.shared.requests import JobRequest
from rocket_core import errors
from rocket_core.errors import InfeasibleBudgetError, RocketError, UnmatchedIgnoreError

# A request's body is far smaller; of answers, most is a message.
MAX_QUESTION_BYTES = 2**22
MAX_ANSWER_BYTES = 2**16
_MAX_MESSAGE = 2000
NOT_CONFINED = 70
"""Exit code of a process that could not be set up: nothing that the model could have caused."""

# More than any model has, and few enough digits to print.
_Count = Annotated[int, Field(ge=0, lt=2**128)]


def _kinds() -> dict[str, type[RocketError | AppError]]:
    known: dict[str, type[RocketError | AppError]] = {OverQuotaError.code: OverQuotaError}
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, RocketError):
            known[kind.code] = kind
    return known


_KINDS = _kinds()


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)


class HubQuestion(_Message):
    """How the Hub is asked.

    Attributes:
        token: the Hub's token; None asks without one.
        endpoint: the Hub's address.
        is_offline: whether the operator forbids to ask it.
        seconds: time for all that is asked.
        proxies: environment variables that name proxies.
    """

    token: str | None = Field(repr=False)
    endpoint: str
    is_offline: bool
    seconds: float
    proxies: Mapping[str, str] = Field(repr=False)


class Question(_Message):
    """A request to judge.

    Attributes:
        request: what is asked for.
        dataset: the calibration's dataset, as the library wants it.
        folder: of a local model, without symbolic links; None for one of the Hub.
        hub: how the Hub is asked; None for a local model.
        model_bytes: most that the tenant's models may have; None is no limit.
        is_estimate: whether figures are wanted.
    """

    request: JobRequest
    dataset: str
    folder: str | None
    hub: HubQuestion | None
    model_bytes: int | None
    is_estimate: bool

    @model_validator(mode="after")
    def _one_source(self) -> "Question":
        if (self.folder is None) == (self.hub is None):
            raise ValueError("a model is either in a folder or on the Hub")
        return self


class Figures(_Message):
    """What a job would take, as far as the model tells; see `app.services.estimates.Estimate`."""

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


class Refusal(_Message):
    """An error of this service or its library.

    Attributes:
        code: stable code of its class.
        message: its message.
        param: the member of the request that is wrong.
        position: which ignore pattern is wrong.
        nearest_ratio: the nearest ratio in reach.
    """

    code: str
    message: Annotated[str, Field(max_length=_MAX_MESSAGE)]
    param: Annotated[str, Field(max_length=100)] | None = None
    position: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    nearest_ratio: float | None = None

    @field_validator("code")
    @classmethod
    def _is_known(cls, code: str) -> str:
        if code not in _KINDS:
            raise ValueError("no code of an error")
        return code

    @classmethod
    def of(cls, error: RocketError | AppError) -> "Refusal":
        """Return what to send of an error; a message that is too long is cut."""
        message = str(error)
        return cls(
            code=error.code,
            message=message if len(message) <= _MAX_MESSAGE else message[: _MAX_MESSAGE - 3] + "...",
            param=getattr(error, "param", None),
            position=getattr(error, "position", None),
            nearest_ratio=getattr(error, "nearest_ratio", None),
        )

    def error(self) -> RocketError | AppError:
        """Return the error again, of the same class and with the same attributes."""
        kind = _KINDS[self.code]
        if kind is UnmatchedIgnoreError:
            return UnmatchedIgnoreError(self.message, position=self.position or 0)
        if kind is InfeasibleBudgetError:
            return InfeasibleBudgetError(self.message, nearest_ratio=self.nearest_ratio or 0.0)
        if kind is OverQuotaError:
            return OverQuotaError(self.message, param=self.param)
        return kind(self.message)


class Answer(_Message):
    """What became of a question.

    Attributes:
        figures: what a job would take; None where it was not asked for, or the weights are not known.
        refusal: why the request cannot be carried out; None if it can.
        fault: an error that the code did not foresee: its class and the places that it passed; empty if there is none.
    """

    figures: Figures | None = None
    refusal: Refusal | None = None
    fault: Annotated[tuple[Annotated[str, Field(pattern=r"^[\w.: -]{1,120}$")], ...], Field(max_length=20)] = ()
