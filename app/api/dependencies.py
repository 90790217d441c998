"""What the endpoints are given."""

import re
from typing import Annotated

from fastapi import Depends, Header, Path, Request

from app.services.context import Context
from app.shared.errors import InvalidRequestError, JobNotFoundError
from app.shared.models import LOCAL_OWNER

_MAX_KEY = 255
_JOB_ID = re.compile(r"job_[0-9a-z]{26}")


def _context(request: Request) -> Context:
    context = request.app.state.context
    assert isinstance(context, Context)
    return context


def _owner() -> str:
    """The tenant: without API keys there is one."""
    return LOCAL_OWNER


def _job_id(job_id: Annotated[str, Path(description="id of a job")]) -> str:
    # Nothing but an id of ours reaches the database, which could not take a NUL.
    if not _JOB_ID.fullmatch(job_id):
        raise JobNotFoundError("there is no job of this id; GET /jobs lists yours")
    return job_id


def _idempotency_key(
    idempotency_key: Annotated[
        str | None, Header(description="Send the same again and again, and one job is made.")
    ] = None,
) -> str | None:
    if idempotency_key is None:
        return None
    # The draft standard has the key in quotes, most clients send it bare.
    key = idempotency_key.strip().removeprefix('"').removesuffix('"')
    if not 1 <= len(key) <= _MAX_KEY or not key.isascii() or not key.isprintable():
        raise InvalidRequestError(
            f"an Idempotency-Key has 1 to {_MAX_KEY} printable ASCII characters", param="Idempotency-Key"
        )
    return key


ContextDep = Annotated[Context, Depends(_context)]
OwnerDep = Annotated[str, Depends(_owner)]
IdempotencyKeyDep = Annotated[str | None, Depends(_idempotency_key)]
JobId = Annotated[str, Depends(_job_id)]
