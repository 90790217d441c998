"""Conditional requests (RFC 9110, 13) and content negotiation."""

from collections.abc import Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response


def check_preconditions(sent: Headers, headers: Mapping[str, str]) -> Response | None:
    """Return the answer to a client that already has this version; None if it is to be sent.

    Args:
        sent: headers of the request.
        headers: those of the response, with an `ETag`, and if it has one, a `Last-Modified`.

    Raises:
        HTTPException: 412, the client asks for another version, or changes one.
    """
    changed_at = _instant(headers.get("Last-Modified"))
    if "if-match" in sent:
        # A weak tag never matches here.
        is_wanted = bool(_tags(sent, "if-match") & {headers["ETag"], "*"})
    else:
        is_wanted = not _is_later(changed_at, _instant(sent.get("if-unmodified-since")))
    if not is_wanted:
        raise HTTPException(HTTPStatus.PRECONDITION_FAILED)
    if "if-none-match" in sent:
        is_known = bool({tag.removeprefix("W/") for tag in _tags(sent, "if-none-match")} & {headers["ETag"], "*"})
    else:
        since = _instant(sent.get("if-modified-since"))
        is_known = None not in (changed_at, since) and not _is_later(changed_at, since)
    return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=dict(headers)) if is_known else None


def _tags(sent: Headers, name: str) -> set[str]:
    return {tag.strip() for line in sent.getlist(name) for tag in line.split(",")}


def _instant(text: str | None) -> datetime | None:
    try:
        return None if text is None else parsedate_to_datetime(text)
    except ValueError:
        # The condition is then ignored.
        return None


def _is_later(first: datetime | None, second: datetime | None) -> bool:
    return first is not None and second is not None and first > second


def prefers_html(accept: str | None) -> bool:
    """Return whether an `Accept` header prefers HTML to JSON; `*/*` does not."""
    weights: dict[str, float] = {}
    for part in (accept or "").split(","):
        kind, *parameters = (text.strip().lower() for text in part.split(";"))
        quality = next((text[2:] for text in parameters if text.startswith("q=")), "1")
        try:
            weights[kind] = float(quality)
        except ValueError:
            continue
    others = weights.get("*/*", 0.0)
    html = weights.get("text/html", 0.0)
    return html > weights.get("application/json", weights.get("application/*", others))
