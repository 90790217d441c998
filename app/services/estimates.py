"""Estimates of what a job would take."""

from typing import Literal

from pydantic import SecretStr

from app.services import quotas
from app.services.context import Context
from app.services.uploads import check_dataset
from app.shared.requests import JobRequest
from rocket_client import models as contract
from rocket_core.errors import HubUnavailableError
from rocket_core.estimates.estimate import expected_seconds, why_not_timed_here
from rocket_core.estimates.operations import Operations
from rocket_core.system.machine import free_disk, free_machine_memory


class Available(contract.Available, extra="forbid"):
    """Free resources where jobs run."""


class Division(contract.Division, extra="forbid"):
    """How the memory of a fit is divided."""


class Estimate(contract.Estimate, extra="forbid"):
    """The estimated resources of a job.

    Only `commit`, `parameters` and `stored_bytes` are exact: they are those of the checkpoint's tensors. The rest is an
    estimate: only the job itself, which builds the model, knows which of its matrices can be compressed.
    """

    object: Literal["estimate"] = "estimate"
    """always `estimate`."""
    commit: str | None
    """commit that the revision points to now; null for a local model."""
    fit: Division | None
    """how the memory of `fit` in the request is divided: what remains of `memory_bytes` after `cache_bytes` (keys and
    values of the context) and `engine_bytes` (the allowance for the engine) is the target size; null for other targets.
    """
    available: Available | None
    """free resources where jobs run; null where they run on other machines."""
    seconds: float | None
    """seconds that the job takes on this machine if it does nothing else, within a factor of 1.5 for most models; null
    where jobs run on other machines or on a GPU, for jobs that evaluate on tasks or measure speed, and for settings
    whose operations are not counted, such as the preset `paper`.
    """


def make_estimate(context: Context, owner: str, request: JobRequest, hub_token: SecretStr | None) -> Estimate:
    """Check a request as if it created a job, and return the job's estimated resources.

    Raises:
        RocketError: the request is invalid, or the Hub is unreachable.
        UploadNotFoundError: the request names a calibration file that the tenant has not uploaded.
        OverQuotaError: the request exceeds the tenant's limits.
    """
    for dataset in request.datasets:
        check_dataset(context, owner, dataset)
    with context.database.snapshot() as session:
        limits = quotas.find_limits(session, context.settings, owner)
    judged = context.admission.estimate(owner, request, limits, hub_token)
    if judged.figures is None:
        raise HubUnavailableError(
            "the model has too many headers to read from the Hub in one request; submit the job, which reads them"
        )
    # With this broker, the worker is a thread of this process.
    runs_here = context.settings.broker.startswith("memory://")
    available: Available | None = None
    unknown: str | None = "jobs run on other machines, whose speed is not known here"
    seconds: float | None = None
    if runs_here:
        available = Available(memory_bytes=free_machine_memory(), disk_bytes=free_disk(context.settings.data_dir))
        unknown = judged.figures.why_no_time or why_not_timed_here()
    if unknown is None:
        assert judged.figures.operations is not None, "operations are unknown for a reason"
        seconds = expected_seconds(Operations(**judged.figures.operations.model_dump()))
    return Estimate(
        model_id=request.model_id,
        available=available,
        warnings=judged.warnings,
        seconds=seconds,
        seconds_unknown=unknown,
        **judged.figures.model_dump(exclude={"operations", "why_no_time"}),
    )
