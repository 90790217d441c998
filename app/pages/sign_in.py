"""`/ui/sign-in`: a key for a cookie."""

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from app.api.addresses import HOME, PAGES, SESSION_COOKIE, SIGN_IN
from app.api.dependencies import ContextDep
from app.pages.form_bodies import FormDep
from app.pages.forms import FieldsDep
from app.pages.rendering import redirect, render
from app.services import access
from app.services.sessions import SESSION_SECONDS, open_session
from app.shared.errors import UnauthenticatedError

router = APIRouter(include_in_schema=False)


@router.get(SIGN_IN)
def show_form(request: Request, next_page: Annotated[str, Query(alias="next")] = HOME) -> Response:
    """Asks for an API key."""
    return render(request, "sign_in.html.j2", next_page=_own(next_page), problem=None)


@router.post(SIGN_IN)
def sign_in(request: Request, context: ContextDep, fields: FormDep) -> Response:
    """Open a session for a valid key."""
    next_page = fields.get("next", HOME)
    try:
        caller = access.authenticate(context.database, f"Bearer {fields.get('key', '')}", is_local=False)
    except UnauthenticatedError as error:
        return render(
            request, "sign_in.html.j2", HTTPStatus.UNAUTHORIZED, next_page=_own(next_page), problem=str(error)
        )
    assert caller.key_id is not None
    answer = redirect(request, _own(next_page))
    answer.set_cookie(
        SESSION_COOKIE,
        open_session(context.settings, caller.key_id),
        max_age=SESSION_SECONDS,
        httponly=True,
        samesite="lax",
        secure=request.url.scheme == "https",
    )
    return answer


@router.post(f"{PAGES}/sign-out")
def sign_out(request: Request, fields: FieldsDep) -> Response:
    """Ends the session of this browser."""
    del fields
    answer = redirect(request, SIGN_IN)
    answer.delete_cookie(SESSION_COOKIE)
    return answer


def _own(address: str) -> str:
    # Nothing that a browser could take for another server's.
    is_own = address.startswith("/") and not address.startswith(("//", "/\\")) and address.isprintable()
    return address if is_own else HOME
