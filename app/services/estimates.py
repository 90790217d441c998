"""What a job would take, told before there is one."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from app.services import quotas
from app.services.context import Context
from app.services.uploads import require_dataset
from app.shared.requests import JobRequest
from rocket_core.errors import HubUnavailableError
from rocket_core.schema import described
from rocket_core.system.machine import free_disk, free_machine_memory

_Count = Annotated[int, Field(ge=0)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", json_schema_extra=described)


class Available(_Frozen):
    """What is free where jobs run.

    Attributes:
        memory_bytes: free memory of the CPU; null where the system does not say.
        disk_bytes: free disk of the data folder.
    """

    memory_bytes: _Count | None
    disk_bytes: _Count


class Estimate(_Frozen):
    """What a job would take.

    Exact are `commit`, `parameters` and `stored_bytes`, which are those of the tensors that the checkpoint stores. The
    rest is an estimate: only the job itself, which builds the model, knows which of its matrices can be compressed.

    Attributes:
        object: always `estimate`.
        model_id: the model, as asked for.
        commit: what the revision names now; null for a local model.
        parameters: of the whole model.
        stored_bytes: bytes of its weights; what a model of the Hub takes to download.
        compressible_parameters: of the layers that can be compressed, without those that are ignored.
        kept_parameters: most that are left of them at the ratio.
        factored_bytes: most bytes that the weights of the factored artifact take.
        ratio: what is asked for, [0, 1), or what has to go of the compressible layers' bytes for the size that is asked
            for; 0 for a profile alone.
        nearest_ratio: the same, or the highest that is certain to be reached if that is less.
        calibration_tokens: most that are read, or what images and audio become in the model; short data have fewer.
        memory_bytes: memory of the device that computes, at the most demanding moment; an evaluation holds the whole
            model.
        disk_bytes: disk for checkpoints, artifacts and what an evaluation keeps meanwhile, the download of the model
            not included.
        available: what is free where jobs run; null where they run on other machines.
        seconds: null: how fast a worker is cannot be told from here.
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
    """Judges a request as if it made a job, and tells what that would take.

    Raises:
        RocketError: the request cannot be carried out, or the Hub not be asked.
        UploadNotFoundError: it names a calibration file that the tenant has not uploaded.
        OverQuotaError: it is larger than the tenant may make.
    """
    for dataset in request.datasets:
        require_dataset(context, owner, dataset)
    with context.database.snapshot() as session:
        limits = quotas.find_limits(session, context.settings, owner)
    figures = context.admission.estimate(owner, request, limits, hub_token)
    if figures is None:
        raise HubUnavailableError(
            "the model has more headers than can be read from the Hub while you wait; the job would read them"
        )
    return Estimate(model_id=request.model_id, available=_available(context), **figures.model_dump())


def _available(context: Context) -> Available | None:
    # With this broker the worker is a thread of this process.
    if not context.settings.broker.startswith("memory://"):
        return None
    return Available(memory_bytes=free_machine_memory(), disk_bytes=free_disk(context.settings.data_dir))
