"""`/` and `/ui/jobs`: where a new user starts, and current and past jobs."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from app.api.dependencies import ActorDep, ContextDep, JobId, OwnerDep
from app.api.ids import AfterJob
from app.api.paths import HOME, PAGES
from app.api.resources import JobView
from app.api.serializers import current_view, current_views, job_view
from app.pages.figure_files import figure_file, figure_links
from app.pages.forms import FORM, FieldsDep
from app.pages.frontier_figure import frontier_of
from app.pages.rendering import redirect, render
from app.pages.stage_list import stage_list
from app.pages.works import export_section, list_views, push_section
from app.services import evaluations, jobs, links, outputs, profiles, uploads, works
from app.services.context import Context
from app.shared import catalog
from app.shared.errors import ProfileNotFoundError, ReportNotReadyError
from app.shared.lifecycle import Status
from app.shared.repositories.audit import Actor
from app.shared.repositories.jobs import JobFilter
from app.shared.requests import SOURCE_EXPORT
from rocket_core.config import DEFAULT_HEALING_TOKENS, Preset
from rocket_core.report.cost_table import cost_comparison
from rocket_core.report.figure import Figure
from rocket_core.report.figures import loss_curve, report_figures
from rocket_core.report.formatting import count_text
from rocket_core.report.layer_maps import running_map
from rocket_core.report.schema import CompressionReport

router = APIRouter(include_in_schema=False)

_JOBS = f"{PAGES}/jobs"
_PAGE = 20
_RECENT = 5
# As `make demo` and the README copy it to the models folder.
_SAMPLE = "local/tiny-llama"
_BETTER_PRESETS: Mapping[Preset, Preset] = MappingProxyType({"instant": "fast", "fast": "best", "best": "max"})
_LOG = 200
_MAX_SEQUENCE = 2**31 - 1


@router.get(HOME)
def show_start(request: Request, context: ContextDep, owner: OwnerDep) -> Response:
    """Show what this is for, how to try it, and the newest jobs."""
    return _list(request, "start.html.j2", context, owner, None, None, most=_RECENT)


@router.get(PAGES)
def find_start(request: Request) -> Response:
    """Redirect from the pages' folder to the first page."""
    return redirect(request, HOME)


@router.get(_JOBS)
def show_jobs(
    request: Request, context: ContextDep, owner: OwnerDep, after: AfterJob = None, status: Status | None = None
) -> Response:
    """Show all jobs, newest first."""
    return _list(request, "jobs.html.j2", context, owner, after, status)


@router.get(f"{PAGES}/recent")
def show_recent(request: Request, context: ContextDep, owner: OwnerDep) -> Response:
    """Show the current rows of the newest jobs only."""
    return _list(request, "job_rows.html.j2", context, owner, None, None, most=_RECENT)


@router.get(f"{PAGES}/rows")
def show_rows(
    request: Request, context: ContextDep, owner: OwnerDep, after: AfterJob = None, status: Status | None = None
) -> Response:
    """Show the current rows of the list only."""
    return _list(request, "job_rows.html.j2", context, owner, after, status)


@router.get(f"{_JOBS}/{{job_id}}")
def show_job(request: Request, job_id: JobId, context: ContextDep, actor: ActorDep) -> Response:
    """Show one job: its progress and its results."""
    return job_page(request, context, actor, job_id)


def job_page(
    request: Request, context: Context, actor: Actor, job_id: str, *, made_link: str | None = None
) -> Response:
    """Return the page of a job.

    Args:
        request: the request to respond to.
        context: the service.
        actor: who sees it.
        job_id: the job.
        made_link: address of its link, which was just created.
    """
    owner = actor.tenant
    job = current_view(context, jobs.get_job(context, owner, job_id))
    report = find_report(context, owner, job_id)
    files = outputs.list_artifacts(context, owner, job_id)
    frontier = _frontier(context, owner, job.profile_id, report)
    return render(
        request,
        "job.html.j2",
        job=job,
        done=works.find_report(context, owner, job_id),
        evaluations=list_views(context, owner, job_id, "evaluation"),
        datasets=uploads.list_datasets(context, owner),
        report=report,
        headlined=with_quality(context, [(job_id, report)])[0],
        curve=_curve(context, owner, job, report),
        can_heal=any(file.name.startswith(f"{SOURCE_EXPORT}/") and file.storage_key for file in files),
        better=_better_preset(job),
        default_tokens=count_text(DEFAULT_HEALING_TOKENS),
        **export_section(context, owner, job_id),
        **push_section(context, actor, job_id),
        figures=() if report is None else report_figures(report),
        cost=None if report is None else cost_comparison(report),
        frontier=frontier,
        files=files,
        link=links.find_link(context, owner, job_id),
        made_link=made_link,
        links=figure_links(f"{_JOBS}/{job_id}"),
        **_state(context, owner, job_id),
    )


def _better_preset(job: JobView) -> Preset | None:
    """Return the preset to improve the result of a job with; None without a result, or for `max` and other methods."""
    if job.status != Status.SUCCEEDED or job.kind != "compression" or job.options.method != "rocket":
        return None
    return _BETTER_PRESETS.get(job.options.preset)


@router.get(f"{_JOBS}/{{job_id}}/live")
def show_progress(
    request: Request, job_id: JobId, context: ContextDep, owner: OwnerDep, shown: Status | None = None
) -> Response:
    """Show a job's current progress; reload the page once the job has ended since it was shown."""
    job = job_view(jobs.get_job(context, owner, job_id))
    answer = render(request, "job_live.html.j2", job=job, **_state(context, owner, job_id))
    if shown is not None and shown != job.status and job.status.is_terminal:
        answer.headers["HX-Refresh"] = "true"
    return answer


@router.get(f"{_JOBS}/{{job_id}}/curve")
def show_curve(
    request: Request,
    job_id: JobId,
    context: ContextDep,
    owner: OwnerDep,
    points: Annotated[int, Query(ge=0, le=_MAX_SEQUENCE)] = 0,
) -> Response:
    """Show the loss curve of a job's healing, if it has other points than those already shown."""
    job = job_view(jobs.get_job(context, owner, job_id))
    curve = _curve(context, owner, job, None)
    if curve is None or len(curve.rows) == points:
        # The page keeps what it has.
        return Response(status_code=204)
    return render(request, "job_curve.html.j2", job=job, curve=curve, links=figure_links(f"{_JOBS}/{job_id}"))


@router.get(f"{_JOBS}/{{job_id}}/map")
def show_map(
    request: Request, job_id: JobId, context: ContextDep, owner: OwnerDep, shown: str | None = None
) -> Response:
    """Show the layers profiled so far, what was chosen for them, and which of them are compressed.

    Nothing if that is what is shown.
    """
    job, state, layers = outputs.list_progress(context, owner, job_id, shown=shown)
    if layers is None and not Status(job.status).is_terminal:
        return Response(status_code=204)
    figure = running_map(layers, compressed=job.compressed_layers) if layers else None
    return render(request, "job_map.html.j2", job=job_view(job), figure=figure, state=state)


@router.get(f"{_JOBS}/{{job_id}}/log")
def show_log(
    request: Request,
    job_id: JobId,
    context: ContextDep,
    owner: OwnerDep,
    after: Annotated[int, Query(ge=0, le=_MAX_SEQUENCE)] = 0,
) -> Response:
    """Show the events since those already shown, to be appended to them."""
    page = jobs.list_events(context, owner, job_id, after=after, limit=_LOG)
    last = page.events[-1].sequence if page.events else after
    return render(
        request,
        "job_log.html.j2",
        job_id=job_id,
        events=page.events,
        last=last,
        is_live=page.has_more or not Status(page.job.status).is_terminal,
        has_more=page.has_more,
    )


@router.get(f"{_JOBS}/{{job_id}}/figures/{{name}}")
def show_figure_data(job_id: JobId, name: str, context: ContextDep, owner: OwnerDep) -> Response:
    """Return the data of a figure, as JSON or CSV."""
    report = find_report(context, owner, job_id)
    figures = [] if report is None else [*report_figures(report), cost_comparison(report)]
    curve = _curve(context, owner, job_view(jobs.get_job(context, owner, job_id)), report)
    return figure_file(name, [*figures, curve])


@router.post(f"{_JOBS}/{{job_id}}/cancel")
def cancel(request: Request, job_id: JobId, context: ContextDep, actor: ActorDep, fields: FieldsDep) -> Response:
    """Cancel a job, and show it."""
    jobs.cancel_job(context, actor, job_id)
    return redirect(request, _JOBS if fields.get("from") == "list" else f"{_JOBS}/{job_id}")


@router.post(f"{_JOBS}/{{job_id}}/retry", dependencies=[FORM])
def retry(request: Request, job_id: JobId, context: ContextDep, actor: ActorDep) -> Response:
    """Retry a job that failed or was cancelled, and show the new one."""
    return redirect(request, f"{_JOBS}/{jobs.retry_job(context, actor, job_id).job.id}")


@router.post(f"{_JOBS}/{{job_id}}/delete", dependencies=[FORM])
def delete(request: Request, job_id: JobId, context: ContextDep, actor: ActorDep) -> Response:
    """Delete a job that has ended, with its files."""
    jobs.delete_job(context, actor, job_id)
    return redirect(request, _JOBS)


def find_report(context: Context, owner: str, job_id: str) -> CompressionReport | None:
    """Return the report of a job; None while it has none."""
    try:
        return CompressionReport.model_validate(outputs.get_report(context, owner, job_id))
    except ReportNotReadyError:
        return None


def _curve(context: Context, owner: str, job: JobView, report: CompressionReport | None) -> Figure | None:
    """Return the loss curve of a job that heals: that of its report, or what is known so far."""
    if job.options.heal_tokens is None:
        return None
    if report is not None and report.healing is not None:
        return loss_curve(report.healing.curve)
    return loss_curve(jobs.list_healing_points(context, owner, job.id))


def _list(
    request: Request,
    template: str,
    context: Context,
    owner: str,
    after: str | None,
    status: Status | None,
    *,
    most: int = _PAGE,
) -> Response:
    page, has_more = jobs.list_jobs(context, owner, JobFilter(status=status), after=after, limit=most)
    return render(
        request,
        template,
        jobs=current_views(context, page),
        has_more=has_more,
        after=after,
        status=status,
        statuses=list(Status),
        is_recent=most == _RECENT,
        models=catalog.list_models(context.settings) if not page else [],
        sample=_SAMPLE if _SAMPLE in catalog.list_models(context.settings) else None,
    )


def with_quality(
    context: Context, reports: Sequence[tuple[str, CompressionReport | None]]
) -> list[CompressionReport | None]:
    """Return the reports of jobs, those without an evaluation with the newest later one."""
    lacking = [job_id for job_id, report in reports if report is not None and report.evaluation is None]
    later = evaluations.newest_evaluations(context, lacking) if lacking else {}
    return [
        report.model_copy(update={"evaluation": later[job_id]}) if report is not None and job_id in later else report
        for job_id, report in reports
    ]


def _state(context: Context, owner: str, job_id: str) -> dict[str, Any]:
    state = jobs.get_state(context, owner, job_id)
    return {"stages": [*stage_list(job_view(state.job), state.stages)], "waiting_before": state.waiting_before}


def _frontier(context: Context, owner: str, profile_id: str | None, report: CompressionReport | None) -> Figure | None:
    if profile_id is None:
        return None
    try:
        predictor, points = profiles.get_frontier(context, owner, profile_id)
    except ProfileNotFoundError:
        return None
    marked, error = None, None
    if report is not None:
        error = report.allocation.total_error
        others = predictor.profile.bytes_beside(len(predictor.profile.layers) + len(report.tables))
        marked = others + sum(layer.stored_bytes for layer in report.layers)
    return frontier_of(predictor, points, marked_bytes=marked, marked_error=error)
