"""`/ui/profiles`: predicted sizes and errors of models."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from app.api.dependencies import ActorDep, ContextDep, OwnerDep
from app.api.ids import AfterProfile
from app.api.paths import PAGES
from app.api.routes.profiles import ProfileId
from app.api.serializers import profile_view
from app.pages.figure_files import figure_file, figure_links
from app.pages.forms import FORM
from app.pages.frontier_figure import predicted_figures
from app.pages.rendering import redirect, render
from app.pages.what_if import Question, QuestionDep, WhatIf
from app.services import profiles, uploads
from app.services.context import Context
from rocket_core.errors import InfeasibleBudgetError

router = APIRouter(include_in_schema=False)

_PROFILES = f"{PAGES}/profiles"
_PAGE = 50


@router.get(_PROFILES)
def show_profiles(request: Request, context: ContextDep, owner: OwnerDep, after: AfterProfile = None) -> Response:
    """Show all profiles, newest first."""
    page, has_more = profiles.list_profiles(context, owner, after=after, limit=_PAGE)
    return render(
        request,
        "profiles.html.j2",
        profiles=list(map(profile_view, page)),
        has_more=has_more,
        settings=context.settings,
        datasets=uploads.list_datasets(context, owner),
    )


@router.get(f"{_PROFILES}/{{profile_id}}")
def show_profile(
    request: Request, profile_id: ProfileId, context: ContextDep, owner: OwnerDep, question: QuestionDep
) -> Response:
    """Show the frontier of a model, and the prediction for one size, number of bits per weight, or ratio."""
    profile = profile_view(profiles.get_profile(context, owner, profile_id))
    values = _what_if(context, owner, profile_id, question, within_reach=True)
    datasets = uploads.list_datasets(context, owner)
    return render(request, "profile.html.j2", profile=profile, datasets=datasets, **values)


@router.get(f"{_PROFILES}/{{profile_id}}/what-if")
def show_what_if(
    request: Request, profile_id: ProfileId, context: ContextDep, owner: OwnerDep, question: QuestionDep
) -> Response:
    """Show the prediction only."""
    profile = profile_view(profiles.get_profile(context, owner, profile_id))
    return render(request, "what_if.html.j2", profile=profile, **_what_if(context, owner, profile_id, question))


@router.get(f"{_PROFILES}/{{profile_id}}/figures/{{name}}")
def show_figure_data(
    profile_id: ProfileId, name: str, context: ContextDep, owner: OwnerDep, question: QuestionDep
) -> Response:
    """Return the data of a figure, as JSON or CSV."""
    values = _what_if(context, owner, profile_id, question)
    return figure_file(name, [values["frontier"], values["allocation"]])


@router.post(f"{_PROFILES}/{{profile_id}}/delete", dependencies=[FORM])
def delete(request: Request, profile_id: ProfileId, context: ContextDep, actor: ActorDep) -> Response:
    """Delete a profile; the jobs that made or used it remain."""
    profiles.delete_profile(context, actor, profile_id)
    return redirect(request, _PROFILES)


def _what_if(
    context: Context, owner: str, profile_id: str, question: Question, *, within_reach: bool = False
) -> dict[str, Any]:
    predictor, points = profiles.get_frontier(context, owner, profile_id)
    asked = WhatIf(predictor, question, within_reach=within_reach)
    refusal, predicted = None, None
    try:
        predicted = profiles.allocate(context, owner, profile_id, asked.target)
    except InfeasibleBudgetError as infeasible:
        refusal = str(infeasible)
    return {
        "asked": asked,
        "refusal": refusal,
        "predicted": predicted,
        "dense_bytes": predictor.profile.dense_bytes,
        "links": figure_links(f"{_PROFILES}/{profile_id}", f"?{asked.query}"),
        **predicted_figures(predictor, points, predicted),
    }
