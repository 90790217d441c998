"""`/ui/profiles`: predicted sizes and errors of models at any ratio."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from app.api.dependencies import ActorDep, ContextDep, OwnerDep
from app.api.ids import AfterProfile
from app.api.paths import PAGES
from app.api.routes.profiles import ProfileId
from app.api.serializers import profile_view
from app.pages.forms import FieldsDep
from app.pages.frontier_figure import frontier_of
from app.pages.jobs import figure_data
from app.pages.rendering import redirect, render
from app.services import profiles
from app.services.context import Context
from rocket_core.errors import InfeasibleBudgetError
from rocket_core.report.figures import Figure, predicted_map
from rocket_core.target import ByRatio

router = APIRouter(include_in_schema=False)

_PROFILES = f"{PAGES}/profiles"
_PAGE = 50
_FIRST_RATIO = 0.3

Ratio = Annotated[float, Query(ge=0, lt=1)]


@router.get(_PROFILES)
def show_profiles(
    request: Request,
    context: ContextDep,
    owner: OwnerDep,
    after: AfterProfile = None,
) -> Response:
    """Show all profiles, newest first."""
    page, has_more = profiles.list_profiles(context, owner, after=after, limit=_PAGE)
    rows = [profile_view(profile) for profile in page]
    return render(request, "profiles.html.j2", profiles=rows, has_more=has_more, settings=context.settings)


@router.get(f"{_PROFILES}/{{profile_id}}")
def show_profile(
    request: Request, profile_id: ProfileId, context: ContextDep, owner: OwnerDep, ratio: Ratio = _FIRST_RATIO
) -> Response:
    """Show the frontier of a model, and the prediction for one ratio."""
    profile = profile_view(profiles.get_profile(context, owner, profile_id))
    ratio = min(ratio, profile.reachable_ratio)
    return render(request, "profile.html.j2", profile=profile, **_what_if(context, owner, profile_id, ratio))


@router.get(f"{_PROFILES}/{{profile_id}}/what-if")
def show_what_if(
    request: Request, profile_id: ProfileId, context: ContextDep, owner: OwnerDep, ratio: Ratio
) -> Response:
    """Show the prediction for one ratio."""
    profile = profile_view(profiles.get_profile(context, owner, profile_id))
    return render(request, "what_if.html.j2", profile=profile, **_what_if(context, owner, profile_id, ratio))


@router.get(f"{_PROFILES}/{{profile_id}}/figures/{{name}}")
def show_figure_data(
    profile_id: ProfileId, name: str, context: ContextDep, owner: OwnerDep, ratio: Ratio = _FIRST_RATIO
) -> Response:
    """Return the data of a figure, as JSON or CSV."""
    values = _what_if(context, owner, profile_id, ratio)
    figures = {figure.name: figure for figure in values.values() if isinstance(figure, Figure)}
    stem, _, suffix = name.rpartition(".")
    return figure_data(figures.get(stem), suffix)


@router.post(f"{_PROFILES}/{{profile_id}}/delete")
def delete(
    request: Request, profile_id: ProfileId, context: ContextDep, actor: ActorDep, fields: FieldsDep
) -> Response:
    """Delete a profile; the jobs that made or used it remain."""
    del fields
    profiles.delete_profile(context, actor, profile_id)
    return redirect(request, _PROFILES)


def _what_if(context: Context, owner: str, profile_id: str, ratio: float) -> dict[str, Any]:
    predictor, points = profiles.get_frontier(context, owner, profile_id)
    model = predictor.profile
    refusal, size, error, allocation = None, None, None, None
    try:
        predicted = profiles.allocate(context, owner, profile_id, ByRatio(ratio=ratio))
    except InfeasibleBudgetError as infeasible:
        refusal = str(infeasible)
    else:
        size = predicted.model_bytes
        error = predicted.allocation.total_error
        allocation = predicted_map(predictor.chosen(predicted.allocation))
    return {
        "ratio": ratio,
        "refusal": refusal,
        "size": size,
        "dense_bytes": model.dense_bytes,
        "error": error,
        "objective": model.objective,
        "allocation": allocation,
        "frontier": frontier_of(predictor, points, marked_bytes=size),
        "links": {
            kind: f"{_PROFILES}/{profile_id}/figures/%s.{kind.lower()}?ratio={ratio}" for kind in ("JSON", "CSV")
        },
    }
