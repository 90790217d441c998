"""Media types and charsets of request bodies."""

from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request

_UTF_8 = frozenset({"utf-8", "utf8"})


def read_media_type(request: Request) -> str:
    """Return the media type of a request's body in lower case; an empty string where the request names none.

    The service never decodes with a codec that a client names: some take quadratic time.

    Raises:
        HTTPException: 415, the body is compressed, is not UTF-8, or has several types.
    """
    sent = request.headers.getlist("content-type")
    if len(sent) > 1:
        raise _unsupported("send one Content-Type header")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise _unsupported("send the body without Content-Encoding")
    media_type, *parameters = (sent[0] if sent else "").split(";")
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        # `charset*` is the extended form of RFC 2231.
        if name.strip().lower() in {"charset", "charset*"} and value.strip().strip('"').lower() not in _UTF_8:
            raise _unsupported("send the body as UTF-8, and name no other charset in Content-Type")
    return media_type.strip().lower()


def _unsupported(detail: str) -> HTTPException:
    return HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, detail)
