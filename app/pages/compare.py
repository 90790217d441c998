"""`/ui/compare`: compressions side by side."""

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from app.api.dependencies import ContextDep, OwnerDep
from app.api.ids import is_job_id
from app.api.paths import PAGES
from app.api.resources import JobView
from app.api.serializers import job_view
from app.pages.figure_files import figure_file, figure_links
from app.pages.jobs import find_report, with_quality
from app.pages.models import quality_figure, quality_links
from app.pages.rendering import render
from app.services import jobs, uploads
from app.services.context import Context
from app.shared.errors import JobNotFoundError
from app.shared.lifecycle import Status
from app.shared.repositories.jobs import JobFilter
from rocket_core.report.figure import Figure
from rocket_core.report.figures import allocation_difference
from rocket_core.report.formatting import bytes_text
from rocket_core.report.headlines import export_rows
from rocket_core.report.layer_groups import summarize_report
from rocket_core.report.quality import quality_rows
from rocket_core.report.schema import CompressionReport

router = APIRouter(include_in_schema=False)

_COMPARE = f"{PAGES}/compare"
_MOST = 6
_OFFERED = 50

_JobIds = Annotated[list[str], Query(alias="job", max_length=_MOST)]


@router.get(_COMPARE)
def show_comparison(request: Request, context: ContextDep, owner: OwnerDep, job_ids: _JobIds = []) -> Response:  # noqa: B006 - never changed
    """Show the selected jobs side by side, and those that can be selected."""
    compared = _reports_of(context, owner, job_ids)
    page, _ = jobs.list_jobs(context, owner, JobFilter(status=Status.SUCCEEDED), after=None, limit=_OFFERED)
    offered = [job for job in map(job_view, page) if job.kind == "compression"]
    models = list(dict.fromkeys(job.model_id for job, _ in compared))
    marked = [job.id for job, _ in compared]
    query = "&".join(f"job={job_id}" for job_id in marked)
    return render(
        request,
        "compare.html.j2",
        offered=offered,
        datasets=uploads.list_datasets(context, owner),
        compared=compared,
        quality=_aligned([quality_rows(one.evaluation) if one.evaluation else [] for _, one in compared]),
        speed=_aligned([export_rows(report) for _, report in compared]),
        figure=_figure(compared) if len(compared) > 1 else None,
        # The figure of a model has all of its compressions, and those that are compared are marked.
        measured=[(quality_figure(context, owner, name, marked), quality_links(name)) for name in models],
        links=figure_links(_COMPARE, f"?{query}"),
        most=_MOST,
    )


@router.get(f"{_COMPARE}/figures/{{name}}")
def show_figure_data(name: str, context: ContextDep, owner: OwnerDep, job_ids: _JobIds = []) -> Response:  # noqa: B006 - as above
    """Return the data of the figure, as JSON or CSV."""
    return figure_file(name, [_figure(_reports_of(context, owner, job_ids))])


def _reports_of(context: Context, owner: str, job_ids: list[str]) -> list[tuple[JobView, CompressionReport]]:
    found: list[tuple[JobView, CompressionReport | None]] = []
    for job_id in dict.fromkeys(job_ids):
        if not is_job_id(job_id):
            raise JobNotFoundError("no job has this id; see the list of jobs")
        job, report = job_view(jobs.get_job(context, owner, job_id)), find_report(context, owner, job_id)
        found.append((job, None if report is None else _compared(report)))
    reports = with_quality(context, [(job.id, report) for job, report in found])
    return [(job, report) for (job, _), report in zip(found, reports, strict=True) if report is not None]


def _compared(report: CompressionReport) -> CompressionReport:
    """Return what is shown of a report, so that one at a time is in memory as a whole."""
    evaluation = None if report.evaluation is None else report.evaluation.model_copy(update={"answers": ()})
    return summarize_report(report).model_copy(update={"evaluation": evaluation})


def _figure(compared: list[tuple[JobView, CompressionReport]]) -> Figure:
    names = [
        f"{number}: {report.model}, {bytes_text(report.totals.stored_bytes)}"
        for number, (_, report) in enumerate(compared, 1)
    ]
    return allocation_difference([(name, report.layers) for name, (_, report) in zip(names, compared, strict=True)])


def _aligned(tables: list[list[tuple[str, str, str]]]) -> dict[str, list[str]]:
    """Return what was measured, with the change in each table; empty where it was not measured."""
    changes = [{name: f"{before} → {after}" if before else after for name, before, after in rows} for rows in tables]
    names = dict.fromkeys(name for table in changes for name in table)
    return {name: [table.get(name, "") for table in changes] for name in names}
