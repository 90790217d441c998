"""`/ui/new`: a form for a compression, with a preview of its result."""

import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus

from fastapi import APIRouter, Request
from fastapi.responses import Response

from app.api.dependencies import ActorDep, AdmissionDep, ContextDep, OwnerDep
from app.api.paths import PAGES
from app.api.problems import param_of, status_of
from app.pages.forms import (
    Fields,
    FieldsDep,
    InvalidFieldsError,
    field_of,
    idempotency_key,
    lacks_size,
    read_compression,
    read_profile,
)
from app.pages.frontier_figure import predicted_figures
from app.pages.rendering import redirect, render
from app.services import estimates, jobs, models, profiles, uploads
from app.services.context import Context
from app.services.estimates import Estimate
from app.services.profiles import Predicted
from app.shared import catalog
from app.shared.errors import AppError, ProfileNotFoundError
from app.shared.models import Profile
from app.shared.repositories.audit import Actor
from app.shared.requests import QUEUES, UPLOAD, JobRequest
from rocket_core.config import PROFILE_RATIOS
from rocket_core.engines import ENGINES, EngineName
from rocket_core.errors import InfeasibleBudgetError, RocketError
from rocket_core.inspection.files.model_parts import OTHERS, PARTS
from rocket_core.report.figure import Figure
from rocket_core.sizes.target import ByBytes

router = APIRouter(include_in_schema=False)

NEW = f"{PAGES}/new"
_DEFAULTS = {
    "dataset": "builtin",
    "samples": "256",
    "preset": "fast",
    "target": "size",
    "ratio": "0.3",
    "engine": "rocket",
    "export": "",
    "loss_measure": "max_kl",
}
# Fields that the address may prefill, so that a job can be repeated with another ratio.
_PREFILLED = (
    *(*_DEFAULTS, "model_id", "revision", "sequence_length", "seed", "size", "bits", "loss"),
    *("fit", "context", "batch", "kv_bits"),
    *("ignore", "include", "storage"),
    *("queue", "label", "improves", "evaluate", "evaluate_dataset", "prompts", "benchmark", "heal"),
    *("accept_kl", "accept_perplexity_increase"),
    *("hub_dataset", "column", "skip_bad_rows", "unpacked"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Preview:
    """The predicted result of a form.

    Attributes:
        estimate: the job's estimated resources; None where the request is refused.
        profile: a profile of the same model, calibration and options; None if none exists.
        predicted: the profile's prediction for the target; None without a profile, or if the target is unreachable.
        refusal: why the job would be refused.
        suggestion: a reachable ratio in place of the requested one.
        frontier: predicted size and error at every ratio.
        allocation: the predicted candidate of each layer.
        lacks_target: whether no target is entered yet.
        engine: name of the engine that runs the result.
    """

    estimate: Estimate | None = None
    profile: Profile | None = None
    predicted: Predicted | None = None
    refusal: str | None = None
    suggestion: float | None = None
    frontier: Figure | None = None
    allocation: Figure | None = None
    lacks_target: bool = False
    engine: EngineName = "rocket"

    @property
    def memory(self) -> tuple[tuple[str, int], ...]:
        """How the memory of a fit is divided; empty for other targets."""
        fit = None if self.estimate is None else self.estimate.fit
        return () if fit is None else fit.parts(ENGINES[self.engine].title, fit.weights_bytes)


@router.get(NEW)
def show_form(request: Request, context: ContextDep, owner: OwnerDep) -> Response:
    """Show a form with defaults, or with the values in the address."""
    prefilled = {name: value for name, value in request.query_params.items() if name in _PREFILLED}
    named = [name for name in ("size", "bits", "fit", "loss", "ratio") if name in prefilled]
    prefilled.setdefault("target", named[0] if named else _DEFAULTS["target"])
    return _form(request, context, owner, _DEFAULTS | prefilled, {})


@router.post(NEW)
async def submit(
    request: Request, context: ContextDep, actor: ActorDep, threads: AdmissionDep, fields: FieldsDep
) -> Response:
    """Create the job, and show it."""
    return await threads.run(_submit, request, context, actor, fields, read_compression)


@router.post(f"{NEW}/profile")
async def submit_profile(
    request: Request, context: ContextDep, actor: ActorDep, threads: AdmissionDep, fields: FieldsDep
) -> Response:
    """Create a job that only profiles the model, and show it."""
    return await threads.run(_submit, request, context, actor, fields, read_profile)


@router.post(f"{NEW}/preview")
async def preview(
    request: Request, context: ContextDep, owner: OwnerDep, threads: AdmissionDep, fields: FieldsDep
) -> Response:
    """Show the predicted result of the form's current content."""
    return await threads.run(_show_preview, request, context, owner, fields)


def _show_preview(request: Request, context: Context, owner: str, fields: Fields) -> Response:
    if not fields.get("model_id"):
        return render(request, "preview.html.j2", preview=None)
    try:
        # A size is chosen by what the model takes, which is shown before one is entered.
        reads = read_profile if lacks_size(fields) else read_compression
        preview = _preview(context, owner, reads(fields))
    except InvalidFieldsError as error:
        preview = Preview(refusal=_sentence(error.problems))
    return render(request, "preview.html.j2", preview=preview)


def _submit(
    request: Request, context: Context, actor: Actor, fields: Fields, read: Callable[[Fields], JobRequest]
) -> Response:
    try:
        job_request = read(fields)
        submission = jobs.submit_job(context, actor, job_request, idempotency_key(fields, job_request))
    except InvalidFieldsError as error:
        return _form(request, context, actor.tenant, fields, error.problems, HTTPStatus.UNPROCESSABLE_ENTITY)
    except (AppError, RocketError) as error:
        status = status_of(type(error))
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR and status is not HTTPStatus.SERVICE_UNAVAILABLE:
            raise
        return _form(request, context, actor.tenant, fields, {field_of(param_of(error) or ""): str(error)}, status)
    return redirect(request, f"{PAGES}/jobs/{submission.job.id}")


def _form(
    request: Request,
    context: Context,
    owner: str,
    fields: Fields,
    problems: Mapping[str, str],
    status: int = HTTPStatus.OK,
) -> Response:
    found = catalog.find_models(context.settings)
    complete = [UPLOAD + model.name for model in models.list_models(context, owner) if model.phase == "ready"]
    return render(
        request,
        "new_job.html.j2",
        status,
        fields=dict.fromkeys(_PREFILLED, "") | _DEFAULTS | dict(fields),
        problems=problems,
        models=[*(model.id for model in found if model.problem is None), *complete],
        unusable=[model for model in found if model.problem is not None],
        model_parts=PARTS,
        model_others=OTHERS,
        datasets=catalog.list_calibrations(context.settings),
        own=uploads.list_uploads(context, owner),
        queues=QUEUES,
        engines=tuple(ENGINES.values()),
        most_ratio=PROFILE_RATIOS[-1],
        form=secrets.token_urlsafe(16),
    )


def _preview(context: Context, owner: str, request: JobRequest) -> Preview:
    try:
        estimate = estimates.make_estimate(context, owner, request, None)
    except (AppError, RocketError) as error:
        return Preview(refusal=str(error), suggestion=_suggestion(request, error))
    profile = profiles.find_profile_for(context, owner, request)
    # It may be deleted since it was found.
    with suppress(ProfileNotFoundError):
        if profile is not None:
            return _predict(context, owner, request, estimate, profile)
    return Preview(estimate=estimate, engine=request.options.engine, lacks_target=request.target is None)


def _suggestion(request: JobRequest, error: Exception) -> float | None:
    """Return a reachable ratio in place of one that is not; messages name reachable sizes and bits themselves."""
    return error.nearest_ratio if isinstance(error, InfeasibleBudgetError) and request.ratio is not None else None


def _predict(context: Context, owner: str, request: JobRequest, estimate: Estimate, profile: Profile) -> Preview:
    predictor, points = profiles.get_frontier(context, owner, profile.id)
    predicted, refusal, nearest = None, None, None
    target = request.target if estimate.fit is None else ByBytes(target_bytes=estimate.fit.weights_bytes)
    try:
        if target is not None:
            predicted = profiles.allocate(context, owner, profile.id, target)
    except InfeasibleBudgetError as error:
        refusal, nearest = str(error), _suggestion(request, error)
    return Preview(
        estimate=estimate,
        profile=profile,
        predicted=predicted,
        refusal=refusal,
        suggestion=nearest,
        lacks_target=request.target is None,
        engine=request.options.engine,
        **predicted_figures(predictor, points, predicted),
    )


def _sentence(problems: Mapping[str, str]) -> str:
    return "; ".join(f"{field}: {problem}" if field else problem for field, problem in problems.items())
