"""`/ui/model`: one model, and the quality of all that was made from it."""

from collections.abc import Collection
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from app.api.dependencies import ContextDep, OwnerDep
from app.api.paths import PAGES
from app.api.serializers import job_view
from app.pages.figure_files import figure_file, figure_links
from app.pages.rendering import render
from app.services import evaluations
from app.services.context import Context
from rocket_core.report.figure import Figure
from rocket_core.report.figures import MeasuredModel, quality_over_size
from rocket_core.report.formatting import bytes_text

router = APIRouter(include_in_schema=False)

MODEL = f"{PAGES}/model"
_MAX_NAME = 256

ModelName = Annotated[str, Query(alias="id", max_length=_MAX_NAME, pattern=r"^[\w./-]+$")]


@router.get(MODEL)
def show_model(request: Request, context: ContextDep, owner: OwnerDep, model_id: ModelName) -> Response:
    """Show the quality of a model's compressions over their size."""
    found = evaluations.list_measurements(context, owner, model_id)
    return render(
        request,
        "model.html.j2",
        model_id=model_id,
        figure=quality_figure(context, owner, model_id),
        links=quality_links(model_id),
        measured=[(job_view(one.job), one) for one in found],
    )


@router.get(f"{MODEL}/figures/{{name}}")
def show_figure_data(name: str, context: ContextDep, owner: OwnerDep, model_id: ModelName) -> Response:
    """Return the data of the figure, as JSON or CSV."""
    return figure_file(name, [quality_figure(context, owner, model_id)])


def quality_figure(context: Context, owner: str, model_id: str, marked: Collection[str] = ()) -> Figure:
    """Return the figure of a model's compressions.

    Args:
        context: the service.
        owner: the tenant.
        model_id: the model.
        marked: ids of jobs that the figure is about in particular.
    """
    found = evaluations.list_measurements(context, owner, model_id)
    return quality_over_size(
        model_id,
        [
            MeasuredModel(
                name=f"…{one.job.id[-6:]}, {bytes_text(one.stored_bytes)}",
                address=f"{PAGES}/jobs/{one.job.id}",
                stored_bytes=one.stored_bytes,
                evaluation=one.evaluation,
                is_marked=one.job.id in marked,
            )
            for one in found
        ],
    )


def quality_links(model_id: str) -> dict[str, str]:
    """Return the addresses of the figure's data, with `%s` for its name."""
    return figure_links(MODEL, f"?id={model_id}")
