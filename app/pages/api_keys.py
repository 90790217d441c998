"""`/ui/keys`: the API keys of a tenant."""

from datetime import UTC, datetime
from http import HTTPStatus

from fastapi import APIRouter, Request
from fastapi.responses import Response

from app.api.dependencies import ActorDep, CallerDep, ContextDep
from app.api.paths import PAGES
from app.pages.forms import FORM, FieldsDep
from app.pages.rendering import redirect, render
from app.services import api_keys
from app.services.access import Caller
from app.services.context import Context
from app.shared.errors import InvalidRequestError
from app.shared.repositories.keys import SCOPES

router = APIRouter(include_in_schema=False)

KEYS = f"{PAGES}/keys"
_MAX_DIGITS = 5


@router.get(KEYS)
def show_keys(request: Request, context: ContextDep, caller: CallerDep) -> Response:
    """Show all keys, without their secrets."""
    return _show(request, context, caller)


@router.post(KEYS)
def create_key(
    request: Request, context: ContextDep, caller: CallerDep, actor: ActorDep, fields: FieldsDep
) -> Response:
    """Create a key, and show it; it cannot be shown again."""
    days = fields.get("days", "")
    chosen = [scope for scope in SCOPES if fields.get(f"scope-{scope}")]
    try:
        if days and not (days.isdecimal() and len(days) <= _MAX_DIGITS):
            raise InvalidRequestError("write a number of days, or nothing for no limit", param="days")
        made = api_keys.create_key(
            context, caller, actor, label=fields.get("label", ""), scopes=chosen, days=int(days) if days else None
        )
    except InvalidRequestError as error:
        return _show(request, context, caller, problem=str(error), status=HTTPStatus.UNPROCESSABLE_ENTITY)
    return _show(request, context, caller, made=made)


@router.post(f"{KEYS}/{{key_id}}/revoke", dependencies=[FORM])
def revoke_key(request: Request, key_id: str, context: ContextDep, caller: CallerDep, actor: ActorDep) -> Response:
    """Revoke a key, and show the others."""
    api_keys.revoke_key(context, caller, actor, key_id)
    return redirect(request, KEYS)


def _show(
    request: Request,
    context: Context,
    caller: Caller,
    *,
    made: str | None = None,
    problem: str | None = None,
    status: int = HTTPStatus.OK,
) -> Response:
    return render(
        request,
        "api_keys.html.j2",
        status,
        keys=api_keys.list_keys(context, caller),
        made=made,
        problem=problem,
        scopes=[scope for scope in SCOPES if scope in caller.scopes],
        may_manage=api_keys.may_manage(context, caller),
        has_key=caller.key_id is not None,
        own=caller.key_id,
        at=datetime.now(UTC),
    )
