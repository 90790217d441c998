"""Templates, and the headers of every page."""

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from http import HTTPStatus
from importlib import resources
from typing import Any
from urllib.parse import urlencode

from fastapi import Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from jinja2 import Environment, PackageLoader
from markupsafe import Markup, escape

from app.api.paths import HOME, SIGN_IN, STATIC, is_shared
from app.api.problems import Problem
from app.pages.page_words import page_words
from app.services.access import Caller
from app.shared.models import LOCAL_OWNER
from app.shared.works import WORKS
from rocket_core import __version__
from rocket_core.report.expectation import expectation
from rocket_core.report.figures import ERROR_NAMES
from rocket_core.report.html import STATIC as FIGURE_FILES
from rocket_core.report.html import environment

_POLICY = (
    "default-src 'self'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; object-src 'none'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_FILES = resources.files(__package__) / "static"


def render(request: Request, template: str, http_status: int = HTTPStatus.OK, **values: Any) -> HTMLResponse:
    """Render a page, or a part of one.

    Args:
        request: the request to respond to.
        template: name of the template.
        http_status: status of the response.
        values: variables of the template.
    """
    caller = getattr(request.state, "caller", None)
    known = {
        # What people without a key see leads nowhere that needs one.
        "show_navigation": not is_shared(request.url.path),
        "path": request.url.path,
        "csrf": caller.csrf if isinstance(caller, Caller) else None,
        "tenant": caller.tenant if isinstance(caller, Caller) and caller.tenant != LOCAL_OWNER else None,
        "now": datetime.now(UTC),
    }
    text = _environment().get_template(template).render(known | values)
    return HTMLResponse(text, int(http_status), headers=_HEADERS)


def redirect(request: Request, address: str) -> Response:
    """Redirect a browser, for a form as well as for an htmx request within a page."""
    if request.headers.get("hx-request") == "true":
        return Response(status_code=HTTPStatus.NO_CONTENT, headers={"HX-Redirect": address})
    return RedirectResponse(address, HTTPStatus.SEE_OTHER)


def problem_page(request: Request, problem: Problem, headers: dict[str, str]) -> Response:
    """Return an error as a page; redirect to the sign-in page if authentication is missing."""
    is_part = request.headers.get("hx-request") == "true"
    if problem.status == HTTPStatus.UNAUTHORIZED:
        is_get = request.method == "GET" and not is_part
        address = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        return redirect(request, sign_in_address(address if is_get else HOME))
    answer = render(request, "problem.html.j2", problem.status, problem=problem)
    if problem.status == HTTPStatus.NOT_FOUND and request.method == "GET" and is_part:
        # What the page shows was deleted; the reloaded page says so.
        answer.headers["HX-Refresh"] = "true"
    answer.headers.update({name: value for name, value in headers.items() if name not in answer.headers})
    return answer


def sign_in_address(address: str) -> str:
    """Return the address of the sign-in page that continues to the wanted one."""
    return SIGN_IN if address == HOME else f"{SIGN_IN}?{urlencode({'next': address})}"


@cache
def static_address(name: str) -> str:
    """Return the address of a script or style, which changes with its content."""
    paths = [path / name for path in (_FILES, FIGURE_FILES)]
    content = next(path.read_bytes() for path in paths if path.is_file())
    return f"{STATIC}/{name}?v={hashlib.sha256(content).hexdigest()[:12]}"


def seconds_since(at: datetime, now: datetime) -> float:
    """Return the seconds between two times, at least 0."""
    return max(0.0, (now - at).total_seconds())


def fill(links: Mapping[str, str], name: str) -> dict[str, str]:
    """Return the addresses of a figure's data, with its name in place of `%s`."""
    return {kind: address.replace("%s", name) for kind, address in links.items()}


def prose(text: str) -> Markup:
    """Return text of this project as HTML; what is quoted with backticks becomes code."""
    parts = (
        Markup("<code>{}</code>").format(part) if odd % 2 else escape(part) for odd, part in enumerate(text.split("`"))
    )
    return Markup("").join(parts)


@cache
def _environment() -> Environment:
    made = environment(PackageLoader(__package__))
    made.filters["prose"] = prose
    made.filters["page_words"] = page_words
    made.globals |= {
        "static": static_address,
        "version": __version__,
        "seconds_since": seconds_since,
        "fill": fill,
        "error_names": ERROR_NAMES,
        "expectation": expectation,
        "works": WORKS,
    }
    return made
