"""Estimates of what a job would take."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from app.services import quotas
from app.services.context import Context
from app.services.uploads import check_dataset
from app.shared.requests import JobRequest
from rocket_core.errors import HubUnavailableError
from rocket_core.schema import described
from rocket_core.system.machine import free_disk, free_machine_memory

_Count = Annotated[int, Field(ge=0)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", json_schema_extra=described)


class Available(_Frozen):
    """Free resources where jobs run.

    Attributes:
        memory_bytes: free CPU memory; null where the system does not report it.
        disk_bytes: free disk space of the data folder.
    """

    memory_bytes: _Count | None
    disk_bytes: _Count


class Estimate(_Frozen):
    """The estimated resources of a job.

    Only `commit`, `parameters` and `stored_bytes` are exact: they are those of the checkpoint's tensors. The rest is an
    estimate: only the job itself, which builds the model, knows which of its matrices can be compressed.

    Attributes:
        object: always `estimate`.
        model_id: the model, as requested.
        commit: commit that the revision points to now; null for a local model.
        parameters: parameters of the whole model.
        stored_bytes: bytes of its weights; also the download size of a model on the Hub.
        compressible_parameters: parameters of the layers that can be compressed, without ignored ones.
        kept_parameters: upper bound on the parameters kept at the ratio.
        factored_bytes: upper bound on the weight bytes of the factored artifact.
        ratio: the requested ratio, [0, 1), or the fraction of the compressible layers' bytes to remove for the
            requested size; 0 if only a profile is requested.
        nearest_ratio: the same, or the highest ratio that is certainly reachable if that is less.
        calibration_tokens: upper bound on the tokens read, or on what images and audio become in the model; short data
            have fewer.
        memory_bytes: peak memory of the device that computes; an evaluation holds the whole model.
        disk_bytes: disk space for checkpoints, artifacts and temporary files of an evaluation, without the download of
            the model.
        available: free resources where jobs run; null where they run on other machines.
        seconds: always null: the speed of a worker is not known here.
    """

    object: Literal["estimate"] = "estimate"
    model_id: str
    commit: str | None
    parameters: _Count
    stored_bytes: _Count
    compressible_parameters: _Count
    kept_parameters: _Count
    factored_bytes: _Count
    ratio: float
    nearest_ratio: float
    calibration_tokens: _Count
    memory_bytes: _Count
    disk_bytes: _Count
    available: Available | None
    seconds: None = None


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
    figures = context.admission.estimate(owner, request, limits, hub_token)
    if figures is None:
        raise HubUnavailableError(
            "the model has too many headers to read from the Hub in one request; submit the job, which reads them"
        )
    return Estimate(model_id=request.model_id, available=_available(context), **figures.model_dump())


def _available(context: Context) -> Available | None:
    # With this broker, the worker is a thread of this process.
    if not context.settings.broker.startswith("memory://"):
        return None
    return Available(memory_bytes=free_machine_memory(), disk_bytes=free_disk(context.settings.data_dir))
