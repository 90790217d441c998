"""What can be told of a request before there is a job: names that do not exist, models that cannot be compressed.

The rest is found in the job's `preflight` stage, under the same codes. Messages name a local model as the client did,
never by its folder on this machine.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any

from pydantic import SecretStr

from app.services.quotas import require_calibration_tokens, require_evaluation_tokens, require_model_size
from app.shared.catalog import find_dataset, find_local_model
from app.shared.repositories.tenants import Quotas
from app.shared.requests import LOCAL, UPLOAD, JobRequest
from app.shared.settings import Settings
from rocket_core.errors import HubUnavailableError, ModelNotFoundError
from rocket_core.footprint import describe_model, positions, sample_positions
from rocket_core.headers import WeightSummary, local_weight_files, read_header, sum_summaries, summarize
from rocket_core.hub import find_repository
from rocket_core.inspection import (
    MAX_CONFIG_BYTES,
    input_kind,
    parse_config,
    ratio_within,
    refuse_calibration,
    refuse_config,
    refuse_ignore,
    refuse_weights,
    window_length,
)
from rocket_core.model_fields import refuse_sizes
from rocket_core.model_files import CONFIG_NAME, read_start, vet_folder

# A request waits no longer than this for the Hub, and while it hangs no more threads than these wait for it.
_HUB_SECONDS = 10.0
_HUB_REQUESTS = 8
# What the Hub's own deadlines may take longer to be noticed.
_SLACK_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmittedModel:
    """What has been seen of a model that may be compressed.

    Attributes:
        commit: of its repository; None for a local model.
        config: the content of its config.json.
        weights: what its headers tell; None where the Hub would take too long to send them.
        positions: of a calibration sample: tokens, or what images and audio become in the model.
        evaluation_length: tokens per window of an evaluation; None if none is asked for.
    """

    commit: str | None
    config: Mapping[str, Any]
    weights: WeightSummary | None
    positions: int
    evaluation_length: int | None


class Admission:
    """Judges requests.

    Args:
        settings: what the operator chose.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._hub_requests = BoundedSemaphore(_HUB_REQUESTS)
        self._hub_threads = ThreadPoolExecutor(_HUB_REQUESTS, thread_name_prefix="hub")

    def admit(self, request: JobRequest, limits: Quotas, hub_token: SecretStr | None = None) -> AdmittedModel:
        """Refuses a request that no worker could carry out, or that is larger than its tenant may make.

        Args:
            request: what is asked for.
            limits: how much its tenant may have.
            hub_token: the Hub is asked with it; None takes the operator's.

        Raises:
            HubUnavailableError: the Hub cannot be asked; the same request may be admitted later.
            OverQuotaError: the model or the calibration is too large.
            RocketError: with the code that the job would have failed with.
        """
        require_calibration_tokens(limits, request.calibration)
        require_evaluation_tokens(limits, request.evaluate)
        for name in (*request.datasets[1:], *request.local_tasks):
            if not name.startswith(UPLOAD):
                find_dataset(self._settings, name)
        dataset = request.calibration.dataset
        if not dataset.startswith(UPLOAD):
            dataset = find_dataset(self._settings, dataset)
        if request.model_id.startswith(LOCAL):
            return _admit_local_model(find_local_model(self._settings, request.model_id), request, dataset, limits)
        token = hub_token or self._settings.hf_token
        secret = None if token is None else token.get_secret_value()
        return self._ask_the_hub(lambda: _admit_hub_model(request, dataset, secret, limits))

    def _ask_the_hub(self, question: Callable[[], AdmittedModel]) -> AdmittedModel:
        if not self._hub_requests.acquire(blocking=False):
            raise HubUnavailableError("too many requests wait for the Hub already; try again later")
        answer = self._hub_threads.submit(question)
        answer.add_done_callback(lambda _: self._hub_requests.release())
        try:
            # In a thread that can be left behind: looking up a name has no deadline of its own.
            return answer.result(timeout=_HUB_SECONDS + _SLACK_SECONDS)
        except TimeoutError as error:
            raise HubUnavailableError("the model repository: the Hub does not answer; try again later") from error


def _admit_local_model(folder: Path, request: JobRequest, dataset: str, limits: Quotas) -> AdmittedModel:
    name = request.model_id
    try:
        vet_folder(folder, name)
        config = parse_config(read_start(folder, CONFIG_NAME, MAX_CONFIG_BYTES + 1), name)
        _refuse(config, request, dataset, name)
        files = local_weight_files(folder, name)
        weights = sum_summaries((summarize(read_header(file, f"{name}/{file.name}")) for file in files), name)
    except OSError as error:
        raise ModelNotFoundError(
            f"a file of {name} cannot be read ({type(error).__name__}); ask the operator of this server"
        ) from error
    require_model_size(limits, weights)
    return _judge(None, config, weights, request, name)


def _admit_hub_model(request: JobRequest, dataset: str, token: str | None, limits: Quotas) -> AdmittedModel:
    repository = find_repository(request.model_id, request.revision, token=token, seconds=_HUB_SECONDS)
    name = "the model repository"
    config = parse_config(repository.read_config(), name)
    _refuse(config, request, dataset, name)
    weights = repository.read_weights()
    require_model_size(limits, weights)
    return _judge(repository.commit, config, weights, request, name)


def _refuse(config: Mapping[str, Any], request: JobRequest, dataset: str, name: str) -> None:
    refuse_config(config, name)
    refuse_calibration(input_kind(config), dataset, request.calibration.sequence_length, name)


def _judge(
    commit: str | None, config: Mapping[str, Any], weights: WeightSummary | None, request: JobRequest, name: str
) -> AdmittedModel:
    if weights is not None:
        refuse_weights(weights, request.ratio or 0.0, name)
        refuse_sizes(config, weights, name)
        refuse_ignore(config, weights, request.options.ignore, name)
        if request.target_bytes is not None:
            options = request.options
            model = describe_model(config, weights, ignore=options.ignore, dtype=options.dtype)
            ratio_within(model.shapes, request.target_bytes, itemsize=model.itemsize, other_bytes=model.other_bytes)
    longest, evaluate = positions(config), request.evaluate
    length = window_length(longest, request.calibration.sequence_length)
    return AdmittedModel(
        commit=commit,
        config=config,
        weights=weights,
        positions=sample_positions(config, input_kind(config), length),
        evaluation_length=None if evaluate is None else window_length(longest, evaluate.sequence_length),
    )
