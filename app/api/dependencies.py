"""Dependencies of the endpoints."""

import re
from dataclasses import replace
from http import HTTPStatus
from typing import Annotated

from fastapi import Depends, Header, Path, Request
from fastapi.security import HTTPBearer
from pydantic import SecretStr
from starlette.exceptions import HTTPException

from app.api.content_types import read_media_type
from app.api.ids import is_job_id
from app.api.tenant_shares import SharedThreads, Threads
from app.services.access import Caller
from app.services.context import Context
from app.shared.errors import InvalidRequestError, JobNotFoundError
from app.shared.repositories.audit import LOCAL_ACTOR, Actor

_JSON = "application/json"
# OAuth tokens are longer than those that users create.
_HUB_TOKEN = re.compile(r"hf_[!-~]{5,2045}")
_MAX_KEY = 255
_LABEL = re.compile(r"metadata\[(.{1,64})\]", re.DOTALL)
_MAX_LABELS = 16
_MAX_LABEL_VALUE = 512


def _context(request: Request) -> Context:
    context = request.app.state.context
    assert isinstance(context, Context)
    return context


def _caller(request: Request) -> Caller:
    """Return the sender of the request, as established by `app.api.middleware.access`."""
    caller = request.state.caller
    assert isinstance(caller, Caller)
    return caller


def _owner(request: Request) -> str:
    """Return the tenant that sends the request."""
    return _caller(request).tenant


def _admission_threads(request: Request) -> Threads:
    """Return the threads for admission checks of the caller's requests."""
    threads: SharedThreads = request.app.state.admissions
    return threads.of(_caller(request))


def _client(request: Request) -> Actor:
    """Return the actor of a request without authentication."""
    address = None if request.client is None else request.client.host
    return Actor(tenant="", name="unknown", address=address, request_id=request.scope["state"].get("request_id"))


def _actor(request: Request) -> Actor:
    """Return the caller as named in the audit log."""
    caller = _caller(request)
    return replace(_client(request), tenant=caller.tenant, name=caller.key_id or LOCAL_ACTOR.name)


def _job_id(job_id: Annotated[str, Path(description="id of a job")]) -> str:
    # Only well-formed ids reach the database, which rejects NUL characters.
    if not is_job_id(job_id):
        raise JobNotFoundError("no job has this id; GET /jobs lists yours")
    return job_id


def _idempotency_key(
    idempotency_key: Annotated[
        str | None, Header(description="Requests with the same key create only one job.")
    ] = None,
) -> str | None:
    if idempotency_key is None:
        return None
    # The draft standard quotes the key; most clients send it bare.
    key = idempotency_key.strip().removeprefix('"').removesuffix('"')
    if not 1 <= len(key) <= _MAX_KEY or not key.isascii() or not key.isprintable():
        raise InvalidRequestError(
            f"an Idempotency-Key must have 1 to {_MAX_KEY} printable ASCII characters", param="Idempotency-Key"
        )
    return key


def _hub_token(
    hub_token: Annotated[
        str | None, Header(description="A Hugging Face Hub token, `hf_...`; stored encrypted until the job ends.")
    ] = None,
) -> SecretStr | None:
    return None if hub_token is None else read_hub_token(hub_token)


def read_hub_token(text: str) -> SecretStr:
    """Return a Hub token that a client sent.

    Raises:
        InvalidRequestError: it is not a valid token.
    """
    token = text.strip()
    if not _HUB_TOKEN.fullmatch(token):
        raise InvalidRequestError(
            "not a valid Hub-Token; it must start with hf_ and contain no spaces", param="Hub-Token"
        )
    return SecretStr(token)


def _check_json(request: Request) -> None:
    sent = read_media_type(request)
    has_body = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
    # The framework reads a body of another type as text and would miss the members of an object in it.
    if sent != _JSON and not sent.endswith("+json") and (sent or has_body):
        raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"send the body as `Content-Type: {_JSON}`")


def _labels(request: Request) -> tuple[tuple[str, str], ...]:
    sent = [(_LABEL.fullmatch(name), value) for name, value in request.query_params.multi_items() if _is_label(name)]
    labels = tuple((match[1], value) for match, value in sent if match)
    # The same limits as for a job's labels; Postgres rejects NUL in queries as well.
    sane = all(len(value) <= _MAX_LABEL_VALUE and "\x00" not in key + value for key, value in labels)
    if len(labels) < len(sent) or len(sent) > _MAX_LABELS or not sane:
        raise InvalidRequestError(
            f"filter by labels with `metadata[key]=value`, at most {_MAX_LABELS}, with keys up to 64 and values "
            f"up to {_MAX_LABEL_VALUE} characters",
            param="metadata",
        )
    return labels


def _is_label(name: str) -> bool:
    return name.partition("[")[0] == "metadata"


JSON_BODY = Depends(_check_json)
# Only documents authentication in OpenAPI; the access middleware enforces it before any endpoint runs.
BEARER = Depends(HTTPBearer(auto_error=False, scheme_name="api_key", description="`rk_...`"))
ContextDep = Annotated[Context, Depends(_context)]
CallerDep = Annotated[Caller, Depends(_caller)]
AdmissionDep = Annotated[Threads, Depends(_admission_threads)]
ActorDep = Annotated[Actor, Depends(_actor)]
ClientDep = Annotated[Actor, Depends(_client)]
OwnerDep = Annotated[str, Depends(_owner)]
HubTokenDep = Annotated[SecretStr | None, Depends(_hub_token)]
IdempotencyKeyDep = Annotated[str | None, Depends(_idempotency_key)]
LabelsDep = Annotated[tuple[tuple[str, str], ...], Depends(_labels)]
JobId = Annotated[str, Depends(_job_id)]
