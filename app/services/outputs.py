"""Results of a job."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from app.services.context import Context
from app.shared.errors import ArtifactExpiredError, ReportNotReadyError
from app.shared.models import Artifact, Job
from app.shared.repositories import jobs, outputs
from app.shared.requests import JobRequest
from rocket_core.candidates import Candidate, LayerProfile
from rocket_core.report.layer_places import LayerShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """The current results of a layer.

    Attributes:
        profile: its candidates.
        chosen: the candidate that the knapsack chose; None before it has run.
    """

    profile: LayerProfile
    chosen: Candidate | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Download:
    """A file to send.

    Attributes:
        artifact: the file's row.
        read: returns its bytes from one position up to another, in pieces.
        url: address that the client can be redirected to; None to send the bytes from here.
    """

    artifact: Artifact
    read: Callable[[int, int], Iterator[bytes]]
    url: str | None


def list_layers(context: Context, owner: str, job_id: str) -> Sequence[Layer]:
    """Return the layers profiled so far, in the order of the model.

    Raises:
        JobNotFoundError: the job does not exist, or is not the tenant's.
    """
    with context.database.snapshot() as session:
        job = jobs.get_job(session, job_id, owner)
        allocation = dict(outputs.list_allocation(session, job.id))
        profiles = outputs.list_layer_profiles(session, job.id)
    return [Layer(profile=profile, chosen=allocation.get(profile.name)) for profile in profiles]


def list_progress(
    context: Context, owner: str, job_id: str, *, shown: str | None
) -> tuple[Job, str, list[tuple[LayerShape, Candidate | None]] | None]:
    """Return a job's layers so far with their chosen candidates, if there are more than a page shows already.

    Args:
        context: the service.
        owner: the tenant.
        job_id: the job.
        shown: what an earlier call called its state; None if nothing is shown.

    Returns:
        The job, a name for the state of its layers, and the layers; None if they are those shown.

    Raises:
        JobNotFoundError: the job does not exist, or is not the tenant's.
    """
    with context.database.snapshot() as session:
        job = jobs.get_job(session, job_id, owner)
        profiled, decided = outputs.count_layers(session, job.id)
        state = f"{profiled}-{decided}-{job.compressed_layers}"
        if state == shown:
            return job, state, None
        allocation = dict(outputs.list_allocation(session, job.id)) if decided else {}
        shapes = outputs.list_layer_shapes(session, job.id)
    return job, state, [(shape, allocation.get(shape.name)) for shape in shapes]


def get_report(context: Context, owner: str, job_id: str) -> dict[str, Any]:
    """Return the allocation report, a `CompressionReport` as JSON.

    Raises:
        JobNotFoundError: the job does not exist, or is not the tenant's.
        ReportNotReadyError: the job has not succeeded.
    """
    with context.database.snapshot() as session:
        job = jobs.get_job(session, job_id, owner)
        report = outputs.find_report(session, job)
    if report is None:
        request = JobRequest.model_validate(job.request)
        if not request.makes_result:
            raise ReportNotReadyError(
                f"{request.kind} jobs have no report; only those that compress, heal or export do"
            )
        raise ReportNotReadyError(f"the job is {job.status}; only succeeded jobs have a report")
    return report.body


def list_artifacts(context: Context, owner: str, job_id: str) -> Sequence[Artifact]:
    """Return the files to download, by name; empty unless the job has succeeded.

    Raises:
        JobNotFoundError: the job does not exist, or is not the tenant's.
    """
    with context.database.snapshot() as session:
        return outputs.list_artifacts(session, jobs.get_job(session, job_id, owner))


def open_artifact(context: Context, owner: str, job_id: str, name: str) -> Download:
    """Return a file to download.

    Raises:
        JobNotFoundError: the job does not exist, or is not the tenant's.
        ArtifactNotFoundError: the job has no artifact of that name.
        ArtifactExpiredError: the artifact's retention time is over.
        StorageError: no download address can be created.
    """
    with context.database.snapshot() as session:
        artifact = outputs.find_artifact(session, jobs.get_job(session, job_id, owner), name)
    if artifact.storage_key is None:
        raise ArtifactExpiredError("the artifact was deleted at the end of its retention period; run the job again")
    store, key, url = context.artifacts, artifact.storage_key, None
    if context.settings.redirect_downloads:
        filename = artifact.name.rsplit("/", 1)[-1]
        url = store.presigned_url(key, filename=filename, media_type=artifact.media_type)
    return Download(artifact=artifact, read=partial(store.read, key), url=url)
