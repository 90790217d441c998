"""Bodies of the pages' forms: URL-encoded, UTF-8, small."""

from http import HTTPStatus
from typing import Annotated
from urllib.parse import parse_qsl

from fastapi import Depends, Request
from fastapi.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from app.api.content_types import read_media_type
from app.shared.errors import InvalidRequestError

MAX_FORM_BYTES = 64 * 1024
"""Largest form accepted, in bytes; the largest of the pages has a few hundred."""
MAX_FIELDS = 64
"""Maximum number of fields of a form."""

_URLENCODED = "application/x-www-form-urlencoded"


async def read_form(request: Request) -> dict[str, str]:
    """Return the fields of a form without surrounding blanks; the last of several fields with one name counts.

    The framework's own reader would decode with a charset that the client chooses, on the event loop.

    Raises:
        HTTPException: 415, the body is not URL-encoded UTF-8; 413, it is too large.
        InvalidRequestError: it has too many fields, or they are not valid UTF-8.
    """
    media_type = read_media_type(request)
    body = await _read_body(request)
    if media_type != _URLENCODED and (media_type or body):
        raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"send the form as `{_URLENCODED}`")
    return await run_in_threadpool(_parse, body)


FormDep = Annotated[dict[str, str], Depends(read_form)]


async def _read_body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_FORM_BYTES:
            raise HTTPException(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the form is larger than {MAX_FORM_BYTES} bytes; send less"
            )
    return bytes(body)


def _parse(body: bytes) -> dict[str, str]:
    try:
        pairs = parse_qsl(
            body.decode("utf-8"), keep_blank_values=True, encoding="utf-8", errors="strict", max_num_fields=MAX_FIELDS
        )
    except UnicodeDecodeError:
        raise InvalidRequestError("the form is not valid UTF-8; encode its fields as UTF-8") from None
    except ValueError:
        # Raised by `max_num_fields`.
        raise InvalidRequestError(f"the form has more than {MAX_FIELDS} fields; send fewer") from None
    return {name: value.strip() for name, value in pairs}
