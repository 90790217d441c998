"""Requests for all endpoints of the service, shared by both clients."""

import math
import re
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from rocket_client._paths import header_text, job_path, profile_path, request_body, token_header, webhook_path
from rocket_client._wire import Call, Request
from rocket_client.errors import InvalidArgumentError
from rocket_client.models import (
    ArtifactList,
    Delivery,
    Estimate,
    EvaluationList,
    ExportList,
    Frontier,
    Job,
    JobPage,
    LayerList,
    NamedList,
    NamedModelList,
    NewWebhook,
    PredictedAllocation,
    Profile,
    ProfilePage,
    PushList,
    ReceivedFile,
    Upload,
    UploadedFile,
    UploadedModel,
    WebhookDetails,
    WebhookList,
)
from rocket_core.report.schema import CompressionReport

# Page size for iterating over all resources.
PAGE = 100
_UPLOAD_ID = re.compile(r"upload/[0-9a-f]{32}")
_MODEL_NAME = re.compile(r"[A-Za-z0-9._-]+")
# Reading the headers of a large model, and storing a piece elsewhere, may take longer than other requests.
_JUDGE_SECONDS = 60.0
_STORE_SECONDS = 120.0
_UPLOAD_TYPES = {".txt": "text/plain", ".jsonl": "application/jsonl"}


def submit(
    model_id: str, settings: Mapping[str, object], *, idempotency_key: str | None, hub_token: str | None
) -> Call[Job]:
    """Return the request that creates a compression job; `settings` become part of the body unchanged."""
    return _new_job("/jobs", request_body(model_id, settings), idempotency_key, hub_token)


def profile(
    model_id: str, settings: Mapping[str, object], *, idempotency_key: str | None, hub_token: str | None
) -> Call[Job]:
    """Return the request that creates a profiling job; `settings` become part of the body unchanged."""
    return _new_job("/profiles", request_body(model_id, settings), idempotency_key, hub_token)


def heal(
    job_id: str, settings: Mapping[str, object], *, idempotency_key: str | None, hub_token: str | None
) -> Call[Job]:
    """Return the request that creates a job which heals the result of another one."""
    body = {name: value for name, value in settings.items() if value is not None}
    return _new_job(job_path(job_id, "healings"), body, idempotency_key, hub_token)


def estimate(model_id: str, settings: Mapping[str, object], *, hub_token: str | None) -> Call[Estimate]:
    """Return the request for the estimated cost of a job."""
    body = request_body(model_id, settings)
    return Call(method="POST", path="/estimates", json=body, headers=token_header(hub_token), answer=Estimate)


def upload(file: Path) -> Call[Upload]:
    """Return the request that uploads a calibration file; raises InvalidArgumentError for an unsupported file type."""
    kind = _UPLOAD_TYPES.get(file.suffix.lower())
    if kind is None:
        raise InvalidArgumentError(f"{file} is neither .txt nor .jsonl; only these can be uploaded")
    return Call(
        method="POST",
        path="/calibrations",
        params={"name": file.name if file.name.isprintable() else None},
        file=file,
        headers={"Content-Type": kind},
        answer=Upload,
    )


def get_upload(upload_id: str) -> Call[Upload]:
    """Return the request for an upload; raises InvalidArgumentError if the id is not valid."""
    return Call(method="GET", path=_upload_path(upload_id), answer=Upload)


def delete_upload(upload_id: str) -> Request:
    """Return the request that deletes an upload; raises InvalidArgumentError if the id is not valid."""
    return _delete(_upload_path(upload_id))


def announce_model(name: str, sizes: Mapping[str, int]) -> Call[UploadedModel]:
    """Return the request that announces a model to upload."""
    files = [{"path": path, "size": size} for path, size in sizes.items()]
    return Call(method="POST", path="/models", json={"name": name, "files": files}, answer=UploadedModel)


def get_model(name: str) -> Call[UploadedModel]:
    """Return the request for an uploaded model."""
    return Call(method="GET", path=_model_path(name), answer=UploadedModel)


def get_file(name: str, path: str) -> Call[UploadedFile]:
    """Return the request for a file of an uploaded model, with what has arrived of it."""
    return Call(method="GET", path=_model_path(name, "files", quote(path)), answer=UploadedFile)


def check_model(name: str) -> Call[UploadedModel]:
    """Return the request that judges a model by its headers."""
    return Call(method="POST", path=_model_path(name, "check"), read_seconds=_JUDGE_SECONDS, answer=UploadedModel)


def save_piece(name: str, path: str, content: bytes, *, start: int, total: int, digest: str) -> Call[ReceivedFile]:
    """Return the request that appends bytes to a file of a model."""
    return Call(
        method="PUT",
        path=_model_path(name, "files", quote(path)),
        content=content,
        headers={
            "Content-Type": "application/octet-stream",
            "Content-Range": f"bytes {start}-{start + len(content) - 1}/{total}",
            "Content-Digest": digest,
        },
        read_seconds=_STORE_SECONDS,
        answer=ReceivedFile,
    )


def delete_model(model_id: str) -> Request:
    """Return the request that deletes an uploaded model; raises InvalidArgumentError if the id is not valid."""
    prefix, _, name = model_id.partition("/")
    if prefix != "upload" or not name:
        raise InvalidArgumentError(f"{model_id!r} is not an uploaded model; expected upload/NAME")
    return _delete(_model_path(name))


def get_job(job_id: str) -> Call[Job]:
    """Return the request for a job."""
    return Call(method="GET", path=job_path(job_id), answer=Job)


def list_jobs(
    *, status: str | None, metadata: Mapping[str, str] | None, after: str | None, limit: int
) -> Call[JobPage]:
    """Return the request for a page of jobs."""
    labels = {f"metadata[{key}]": value for key, value in (metadata or {}).items()}
    params = {"status": status, "after": after, "limit": limit, **labels}
    return Call(method="GET", path="/jobs", params=params, answer=JobPage)


def cancel(job_id: str) -> Call[Job]:
    """Return the request that cancels a job."""
    return Call(method="POST", path=job_path(job_id, "cancel"), answer=Job)


def retry(job_id: str, *, hub_token: str | None) -> Call[Job]:
    """Return the request that retries a job."""
    return Call(method="POST", path=job_path(job_id, "retry"), headers=token_header(hub_token), answer=Job)


def delete(job_id: str) -> Request:
    """Return the request that deletes a job."""
    return _delete(job_path(job_id))


def evaluate(
    job_id: str, settings: Mapping[str, object], *, idempotency_key: str | None, hub_token: str | None
) -> Call[Job]:
    """Return the request that creates a job which evaluates another one's artifact; `settings` are its body."""
    return _new_job(job_path(job_id, "evaluations"), dict(settings), idempotency_key, hub_token)


def export(job_id: str, settings: Mapping[str, object], *, idempotency_key: str | None) -> Call[Job]:
    """Return the request that creates a job which writes the result of another one in another format."""
    body = {name: value for name, value in settings.items() if value is not None}
    return _new_job(job_path(job_id, "exports"), body, idempotency_key, None)


def exports(job_id: str) -> Call[ExportList]:
    """Return the request for the jobs that write the result of a job in other formats."""
    return Call(method="GET", path=job_path(job_id, "exports"), answer=ExportList)


def push(
    job_id: str, settings: Mapping[str, object], *, idempotency_key: str | None, hub_token: str | None
) -> Call[Job]:
    """Return the request that creates a job which pushes another one's files to the Hub."""
    body = {name: value for name, value in settings.items() if value is not None}
    return _new_job(job_path(job_id, "pushes"), body, idempotency_key, hub_token)


def pushes(job_id: str) -> Call[PushList]:
    """Return the request for the pushes of a job's files."""
    return Call(method="GET", path=job_path(job_id, "pushes"), answer=PushList)


def evaluations(job_id: str) -> Call[EvaluationList]:
    """Return the request for the evaluations of a job's artifact."""
    return Call(method="GET", path=job_path(job_id, "evaluations"), answer=EvaluationList)


def layers(job_id: str) -> Call[LayerList]:
    """Return the request for the layers of a job."""
    return Call(method="GET", path=job_path(job_id, "layers"), answer=LayerList)


def report(job_id: str) -> Call[CompressionReport]:
    """Return the request for the report of a job."""
    return Call(method="GET", path=job_path(job_id, "report"), answer=CompressionReport)


def artifacts(job_id: str) -> Call[ArtifactList]:
    """Return the request for the artifacts of a job."""
    return Call(method="GET", path=job_path(job_id, "artifacts"), answer=ArtifactList)


def list_profiles(*, after: str | None, limit: int) -> Call[ProfilePage]:
    """Return the request for a page of profiles."""
    return Call(method="GET", path="/profiles", params={"after": after, "limit": limit}, answer=ProfilePage)


def get_profile(profile_id: str) -> Call[Profile]:
    """Return the request for a profile."""
    return Call(method="GET", path=profile_path(profile_id), answer=Profile)


def frontier(profile_id: str) -> Call[Frontier]:
    """Return the request for a profiled model's sizes and errors at all ratios."""
    return Call(method="GET", path=profile_path(profile_id, "frontier"), answer=Frontier)


def allocate(
    profile_id: str, *, ratio: float | None, model_bytes: int | None, bits: float | None, error: float | None
) -> Call[PredictedAllocation]:
    """Return the request for a predicted allocation; raises InvalidArgumentError unless exactly one number is given."""
    numbers = {"ratio": ratio, "model_bytes": model_bytes, "bits": bits, "error": error}
    target = {name: value for name, value in numbers.items() if value is not None}
    if len(target) != 1 or not all(map(math.isfinite, target.values())):
        raise InvalidArgumentError("specify exactly one of ratio, model_bytes, bits and error")
    return Call(method="POST", path=profile_path(profile_id, "allocations"), json=target, answer=PredictedAllocation)


def delete_profile(profile_id: str) -> Request:
    """Return the request that deletes a profile."""
    return _delete(profile_path(profile_id))


def create_webhook(url: str, *, events: Sequence[str] | None) -> Call[NewWebhook]:
    """Return the request that creates a webhook."""
    body = {"url": url} | ({} if events is None else {"events": list(events)})
    # If the answer is lost, so is the secret.
    return Call(method="POST", path="/webhooks", json=body, is_idempotent=False, answer=NewWebhook)


def list_webhooks() -> Call[WebhookList]:
    """Return the request for all webhooks."""
    return Call(method="GET", path="/webhooks", answer=WebhookList)


def get_webhook(webhook_id: str) -> Call[WebhookDetails]:
    """Return the request for a webhook."""
    return Call(method="GET", path=webhook_path(webhook_id), answer=WebhookDetails)


def test_webhook(webhook_id: str) -> Call[Delivery]:
    """Return the request that sends a test delivery to a webhook."""
    # A second one would send another delivery.
    return Call(method="POST", path=f"{webhook_path(webhook_id)}/test", is_idempotent=False, answer=Delivery)


def delete_webhook(webhook_id: str) -> Request:
    """Return the request that deletes a webhook."""
    return _delete(webhook_path(webhook_id))


def models() -> Call[NamedModelList]:
    """Return the request for the models that the server offers."""
    return Call(method="GET", path="/models", answer=NamedModelList)


def calibrations() -> Call[NamedList]:
    """Return the request for the calibration datasets that the server offers."""
    return Call(method="GET", path="/calibrations", answer=NamedList)


def _new_job(path: str, body: dict[str, object], idempotency_key: str | None, hub_token: str | None) -> Call[Job]:
    # There is always a key: a request whose answer is lost is retried, and must not create a second job.
    headers = {"Idempotency-Key": header_text(idempotency_key or str(uuid.uuid4())), **token_header(hub_token)}
    return Call(method="POST", path=path, json=body, headers=headers, answer=Job)


def _delete(path: str) -> Request:
    # A second deletion would be answered with "not found".
    return Request(method="DELETE", path=path, is_idempotent=False)


def _upload_path(upload_id: str) -> str:
    if not _UPLOAD_ID.fullmatch(upload_id):
        raise InvalidArgumentError(
            f"{upload_id!r} is not an upload id; expected upload/ followed by 32 hexadecimal digits"
        )
    return f"/calibrations/{upload_id.partition('/')[2]}"


def _model_path(name: str, *parts: str) -> str:
    if not _MODEL_NAME.fullmatch(name):
        raise InvalidArgumentError(
            f"{name!r} is not a name for a model; use letters, digits, dots, dashes and underscores"
        )
    return "/".join(("/models", name, *parts))
