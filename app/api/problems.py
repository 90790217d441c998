"""Errors as RFC 9457 problem documents.

No document repeats what was sent.
"""

import logging
import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import iter_route_contexts
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from app.api.ids import FORMS
from app.api.json_bodies import DUPLICATE_NAME
from app.api.middleware.forwarding import HSTS
from app.api.negotiation import prefers_html
from app.api.paths import is_page
from app.shared import errors
from rocket_core import errors as core_errors

PROBLEM_TYPE = "application/problem+json"
RETRY_AFTER_SECONDS = 5

# Errors whose own message is for the operator, as it contains paths of this machine: what the client gets instead.
_FAILURES: dict[type[Exception], str] = {
    errors.AppError: "the service failed; try again later, or ask its operator, whose log has the details",
    errors.InvalidSettingsError: "the service is not set up correctly; ask its operator, whose log has the details",
    errors.StorageError: "the service cannot read or write its files; ask its operator, whose log has the details",
    errors.DiskFullError: "the service's disk is full; try again later, or ask its operator to free some space",
}
# Codes of errors that the framework raises before our code runs, where they are not the status's own name.
_FRAMEWORK_CODES = {
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "body_too_large",
    HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE: "range_not_satisfiable",
}
# Statuses with our own messages; the framework's may repeat what was sent.
_OUR_OWN_WORDS = {
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    HTTPStatus.MISDIRECTED_REQUEST,
    *_FRAMEWORK_CODES,
}
_FIELD = re.compile(r"[a-z_]{1,40}")
_log = logging.getLogger(__name__)


class Problem(BaseModel):
    """An error (RFC 9457)."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    type: str
    """the kind of error, a URN that ends with `code`."""
    title: str
    """the status in words."""
    status: int
    """the HTTP status, 400 to 599."""
    detail: str
    """what is wrong, where, and what to do."""
    code: str
    """stable code of the kind of error."""
    request_id: str | None
    """id of the request in the service's log; null where it has none."""
    param: str | None = None
    """the invalid member of the request; nested members are separated by a dot."""
    errors: list[dict[str, str]] | None = None
    """`param` and `message` of all invalid members."""
    missing: list[str] | None = None
    """dependencies that are not available; only in responses about readiness."""
    broker: str | None = None
    """how the workers are notified of jobs; only in responses about readiness."""
    nearest_ratio: float | None = None
    """the reachable ratio nearest to the requested one, [0, 1)."""


_SCHEMA = {"$ref": f"#/components/schemas/{Problem.__name__}"}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return an endpoint's problem documents for the OpenAPI document; `default` is for failures of the service."""
    # Written out, as the framework would file a model under the media type of the endpoint's success.
    content = {PROBLEM_TYPE: {"schema": _SCHEMA}}
    answers: dict[int | str, dict[str, Any]] = {"default": {"content": content, "description": "The service failed"}}
    for status in statuses:
        answers[status] = {"content": content, "description": HTTPStatus(status).phrase}
    return answers


def install_error_handlers(app: FastAPI) -> None:
    """Register the handlers that turn errors into problem documents."""
    for kind, handler in ERROR_HANDLERS.items():
        app.add_exception_handler(kind, handler)
    app.add_exception_handler(Exception, _on_unknown_error)


def status_of(kind: type[errors.AppError | core_errors.RocketError]) -> HTTPStatus:
    """Return the status of an error's class."""
    if issubclass(kind, errors.AppError):
        return kind.status
    # Requests raise only those library errors that are about their content; the rest end jobs.
    return HTTPStatus.SERVICE_UNAVAILABLE if kind.retryable else HTTPStatus.UNPROCESSABLE_ENTITY


def problem(
    request: Request, status: HTTPStatus, code: str, detail: str, *, headers: dict[str, str] | None = None, **more: Any
) -> Response:
    """Return a problem document, or a page with the same content.

    Args:
        request: the request to respond to.
        status: HTTP status.
        code: stable code of the error.
        detail: what is wrong, where, and what to do.
        headers: further headers.
        more: further members of the document.
    """
    request_id = request.scope.get("state", {}).get("request_id")
    document = Problem(
        type=f"urn:rocket:error:{code}",
        title=status.phrase,
        status=status.value,
        detail=detail,
        code=code,
        request_id=request_id,
        **more,
    )
    if wants_page(request):
        page: Response = request.app.state.problem_page(request, document, headers or {})
        return page
    body = document.model_dump(exclude_unset=True)
    return JSONResponse(body, status.value, headers, media_type=PROBLEM_TYPE)


def wants_page(request: Request) -> bool:
    """Return whether a request comes from a page, or from a browser that prefers one."""
    asks = request.headers.get("hx-request") == "true" or prefers_html(request.headers.get("accept"))
    return is_page(request.url.path) and asks


def param_of(error: Exception) -> str | None:
    """Return the member of a request that an error is about; None if it is about no particular member."""
    if isinstance(error, core_errors.UnmatchedIgnoreError):
        return f"options.ignore.{error.position}"
    param: str | None = getattr(error, "param", None)
    return param


def _on_known_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, errors.AppError | core_errors.RocketError)
    status = status_of(type(error))
    headers, detail = {}, str(error)
    if status is HTTPStatus.CONFLICT:
        # Clients of other job services treat a conflict as temporary and repeat the request.
        headers["x-should-retry"] = "false"
    if status is HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    if status in {HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS}:
        headers["Retry-After"] = str(getattr(error, "retry_after", RETRY_AFTER_SECONDS))
    elif status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        _log.error("%s", error, extra={"code": error.code})
        detail = next(_FAILURES[kind] for kind in type(error).__mro__ if kind in _FAILURES)
    more = {"nearest_ratio": error.nearest_ratio} if isinstance(error, core_errors.InfeasibleBudgetError) else {}
    return problem(request, status, error.code, detail, headers=headers, param=param_of(error), **more)


def _on_invalid_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    invalid = next((item for item in error.errors() if item["type"] == "json_invalid"), None)
    if invalid is not None:
        is_double = invalid["ctx"]["error"] == DUPLICATE_NAME
        detail = (
            f"the body is ambiguous: {DUPLICATE_NAME}; send each name once"
            if is_double
            else "the body is not valid JSON"
        )
        return problem(request, HTTPStatus.BAD_REQUEST, "bad_request", detail)
    problems = [{"param": _param(item["loc"]), "message": _message(item)} for item in error.errors()]
    detail = "; ".join(f"{item['param']}: {item['message']}" for item in problems[:3])
    code = errors.InvalidRequestError.code
    return problem(request, HTTPStatus.UNPROCESSABLE_ENTITY, code, detail, param=problems[0]["param"], errors=problems)


def _on_framework_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    code = _FRAMEWORK_CODES.get(status, status.name.lower())
    headers = dict(error.headers or {})
    if status is HTTPStatus.METHOD_NOT_ALLOWED:
        # The framework names the methods of the first matching route only, but one path may have several.
        headers["Allow"] = ", ".join(sorted(_methods(request)))
    detail = error.detail if status in _OUR_OWN_WORDS else status.description or status.phrase
    return problem(request, status, code, detail, headers=headers)


def _on_disconnect(request: Request, error: Exception) -> Response:
    """Respond to a disconnected client: for the log and the metrics, which count a bad request."""
    assert isinstance(error, ClientDisconnect)
    _log.info("the client closed the connection before its request was complete")
    return problem(request, HTTPStatus.BAD_REQUEST, "bad_request", "the request is incomplete; send it again")


def _on_unknown_error(request: Request, error: Exception) -> Response:
    _log.error("unexpected error", exc_info=error)
    detail = "an unexpected error occurred; the service's log has the details under this request id"
    request_id = request.scope.get("state", {}).get("request_id", "")
    # Raised outside of the middleware that adds these headers.
    headers = {"X-Request-Id": request_id}
    if request.url.scheme == "https":
        headers |= dict([HSTS])
    return problem(request, HTTPStatus.INTERNAL_SERVER_ERROR, "internal_error", detail, headers=headers)


def _methods(request: Request) -> set[str]:
    methods: set[str] = set()
    for route in iter_route_contexts(request.app.routes):
        if route.original_route.matches(request.scope)[0] is not Match.NONE:
            methods |= route.methods or set()
    return methods


ERROR_HANDLERS: dict[type[Exception], Callable[[Request, Exception], Response]] = {
    errors.AppError: _on_known_error,
    core_errors.RocketError: _on_known_error,
    RequestValidationError: _on_invalid_request,
    HTTPException: _on_framework_error,
    ClientDisconnect: _on_disconnect,
}
"""Handlers by class of error; any other error is a bug."""


def _param(location: tuple[int | str, ...]) -> str:
    # Names of labels are chosen by the client; parts that do not look like a field name are not repeated either.
    parts = [str(part) for part in location if isinstance(part, int) or _FIELD.fullmatch(part)]
    if parts[:1] == ["body"] and len(parts) > 1:
        parts = parts[1:]
    return ".".join(parts[: parts.index("metadata") + 1] if "metadata" in parts else parts)


def _message(item: dict[str, Any]) -> str:
    if item["type"] == "string_pattern_mismatch":
        # The framework shows the regular expression, which is not helpful to most users.
        return FORMS.get(item["ctx"]["pattern"], "does not have the format documented in GET /openapi.json")
    return str(item["msg"]).removeprefix("Value error, ")
