"""`/ui/sign-in`: exchange of an API key for a session cookie."""

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from app.api.dependencies import ActorDep, CallerDep, ClientDep, ContextDep
from app.api.paths import HOME, PAGES, SESSION_COOKIE, SIGN_IN
from app.pages.form_bodies import FormDep
from app.pages.forms import FORM
from app.pages.rendering import redirect, render
from app.services import sessions
from app.services.sessions import SESSION_SECONDS
from app.shared.errors import UnauthenticatedError

router = APIRouter(include_in_schema=False)


@router.get(SIGN_IN)
def show_form(request: Request, next_page: Annotated[str, Query(alias="next")] = HOME) -> Response:
    """Show the form that asks for an API key."""
    return render(request, "sign_in.html.j2", next_page=_own(next_page), problem=None)


@router.post(SIGN_IN)
def sign_in(request: Request, context: ContextDep, client: ClientDep, fields: FormDep) -> Response:
    """Open a session for a valid key."""
    next_page = _own(fields.get("next", HOME))
    try:
        token = sessions.sign_in(context, fields.get("key", ""), client, request.app.state.sign_in_failures)
    except UnauthenticatedError as error:
        return render(request, "sign_in.html.j2", HTTPStatus.UNAUTHORIZED, next_page=next_page, problem=str(error))
    answer = redirect(request, next_page)
    answer.set_cookie(
        SESSION_COOKIE,
        token,
        max_age=SESSION_SECONDS,
        httponly=True,
        samesite="lax",
        secure=request.url.scheme == "https",
    )
    return answer


@router.post(f"{PAGES}/sign-out", dependencies=[FORM])
def sign_out(request: Request, context: ContextDep, caller: CallerDep, actor: ActorDep) -> Response:
    """End the session of this browser, for every copy of its cookie."""
    sessions.sign_out(context, caller, actor)
    answer = redirect(request, SIGN_IN)
    answer.delete_cookie(SESSION_COOKIE)
    return answer


def _own(address: str) -> str:
    # Refuse anything that a browser could interpret as an address of another server.
    is_own = address.startswith("/") and not address.startswith(("//", "/\\")) and address.isprintable()
    return address if is_own else HOME
