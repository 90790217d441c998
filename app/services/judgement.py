"""Checks of a request against its model's files: whether the model can be compressed, and what that would take.

Runs in a separate process, as the files are untrusted (`app.services.judge_process`). Other faults are found in the
job's `preflight` stage, under the same codes. Messages name a local model as the client did, never by its folder on
this machine.
"""

from collections.abc import Mapping
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

from app.services.questions import Figures, HubQuestion, Judged, Operations, Question
from app.shared.errors import OverQuotaError
from app.shared.requests import UPLOAD, JobRequest
from rocket_core.config import BUILTIN_DATASET
from rocket_core.errors import ModelNotFoundError
from rocket_core.estimates.coverage import coverage_of_headers
from rocket_core.estimates.estimate import RunEstimate, estimate_run
from rocket_core.exports.gguf_size import dense_file_bytes
from rocket_core.hub.repository import find_repository
from rocket_core.hub.requests import (
    InspectedModel,
    check_data,
    check_headers,
    check_settings,
    check_tokens,
    read_settings,
    read_weights,
)
from rocket_core.inspection.checks.preconditions import parse_config
from rocket_core.inspection.files.model_files import check_adapter
from rocket_core.inspection.headers.weight_summary import WeightSummary

# Lines of calibration data that are judged with the request; the run reads all.
_MOST_LINES = 10_000


def judge(question: Question) -> Judged:
    """Refuse a request that no worker could carry out; return what is known of it, with an estimate if requested.

    Raises:
        HubUnavailableError: the Hub is unreachable; the same request may be admitted later.
        OverQuotaError: the model is too large for the tenant.
        RocketError: the request is invalid; the code is that which the job would have failed with.
    """
    model = _see_local_model(question) if question.hub is None else _see_hub_model(question, question.hub)
    if model is None:
        return Judged()
    config = question.request.compression_config(dataset=BUILTIN_DATASET)
    figures = None
    if question.is_estimate:
        estimate = estimate_run(model.settings, model.weights, config, dense_file_bytes=model.dense_file_bytes)
        selected, figures = estimate.coverage, _figures(estimate, model.commit, question.request)
    else:
        selected = coverage_of_headers(model.settings, model.weights, config)
    return Judged(warnings=() if selected.warning is None else (selected.warning,), figures=figures)


def check_model_size(most: int | None, weights: WeightSummary | None) -> None:
    """Refuse a model that is too large for a tenant, or of unknown size where size is limited.

    Args:
        most: upper bound on the bytes of weights; None for no limit.
        weights: summary of the headers; None if they could not be read in time.

    Raises:
        OverQuotaError: the model is too large, or of unknown size.
    """
    if most is None:
        return
    if weights is None:
        raise OverQuotaError(
            f"models may have at most {most} bytes, and the size of this one could not be determined in time",
            param="model_id",
        )
    size = sum(weights.dtype_bytes.values())
    if size > most:
        raise OverQuotaError(f"the model has {size} bytes of weights; at most {most} are allowed", param="model_id")


def _see_local_model(question: Question) -> InspectedModel:
    assert question.folder is not None
    folder, name = Path(question.folder), question.request.model_id
    config = question.request.compression_config(dataset=BUILTIN_DATASET)
    try:
        settings = read_settings(folder, name)
        _refuse(settings, question, name)
        weights = read_weights(folder, name, settings)
        check_model_size(question.model_bytes, weights)
        files = [file.name for file in folder.iterdir()]
        file_bytes = cache(partial(dense_file_bytes, settings, weights, config, folder))
        check_headers(settings, weights, config, files, name, dense_file_bytes=file_bytes)
        check_tokens(settings, config, folder, name)
    except OSError as error:
        raise ModelNotFoundError(
            f"a file of {name} cannot be read ({type(error).__name__}); ask the operator of this server"
        ) from error
    return InspectedModel(settings=settings, weights=weights, dense_file_bytes=file_bytes())


def _see_hub_model(question: Question, hub: HubQuestion) -> InspectedModel | None:
    """Check a model on the Hub; return None if that would take too long to send its headers."""
    request = question.request
    repository = find_repository(request.model_id, request.revision, token=hub.token, seconds=hub.seconds)
    name = "the model repository"
    check_adapter(repository.files, name)
    settings = parse_config(repository.read_config(), name)
    _refuse(settings, question, name)
    weights = repository.read_weights(settings)
    check_model_size(question.model_bytes, weights)
    check_headers(settings, weights, request.compression_config(dataset=BUILTIN_DATASET), repository.files, name)
    return None if weights is None else InspectedModel(settings=settings, weights=weights, commit=repository.commit)


def _refuse(settings: Mapping[str, Any], question: Question, name: str) -> None:
    dataset = question.request.calibration.dataset
    # The text of an upload is not on this machine.
    read = BUILTIN_DATASET if dataset.startswith(UPLOAD) else question.dataset
    config = question.request.compression_config(dataset=read)
    check_settings(settings, config, name)
    if not question.lacks_data:
        check_data(settings, config, name, name=dataset, most_lines=_MOST_LINES)


def _figures(estimate: RunEstimate, commit: str | None, request: JobRequest) -> Figures:
    counted = estimate.operations
    figures = {name: getattr(estimate, name) for name in Figures.model_fields if hasattr(estimate, name)}
    return Figures.model_validate(
        figures
        | {
            "commit": commit,
            "selected_bytes": estimate.coverage.selected_bytes,
            "operations": None if counted is None else Operations(**asdict(counted)),
            # Its files are put together from the pieces in which they arrived.
            "disk_bytes": estimate.disk_bytes + (estimate.stored_bytes if request.uploaded_model is not None else 0),
        }
    )
