"""What can be told of a request before there is a job: names that do not exist, models that cannot be compressed.

The rest is found in the job's `preflight` stage, under the same codes. Messages name a local model as the client did,
never by its folder on this machine.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import BoundedSemaphore

from app.services.quotas import require_calibration_tokens, require_model_size
from app.shared.catalog import find_dataset, find_local_model
from app.shared.repositories.tenants import Quotas
from app.shared.requests import LOCAL, JobRequest
from app.shared.settings import Settings
from rocket_core.errors import HubUnavailableError, ModelNotFoundError, UnsupportedArchitectureError
from rocket_core.headers import local_weight_files, read_header, sum_summaries, summarize
from rocket_core.hub import find_repository
from rocket_core.inspection import parse_config, refuse_config, refuse_weights

# A request waits no longer than this for the Hub, and while it hangs no more threads than these wait for it.
_HUB_SECONDS = 10.0
_HUB_REQUESTS = 8
_MAX_CONFIG_BYTES = 2**22


class Admission:
    """Judges requests.

    Args:
        settings: what the operator chose.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._hub_requests = BoundedSemaphore(_HUB_REQUESTS)

    def admit(self, request: JobRequest, limits: Quotas) -> None:
        """Refuses a request that no worker could carry out, or that is larger than its tenant may make.

        Raises:
            HubUnavailableError: the Hub cannot be asked; the same request may be admitted later.
            OverQuotaError: the model or the calibration is too large.
            RocketError: with the code that the job would have failed with.
        """
        require_calibration_tokens(limits, request.calibration)
        find_dataset(self._settings, request.calibration.dataset)
        if request.model_id.startswith(LOCAL):
            _admit_local_model(find_local_model(self._settings, request.model_id), request, limits)
            return
        with self._asking_the_hub():
            _admit_hub_model(request, self._token(), limits)

    @contextmanager
    def _asking_the_hub(self) -> Iterator[None]:
        if not self._hub_requests.acquire(blocking=False):
            raise HubUnavailableError("too many requests wait for the Hub already; try again later")
        try:
            yield
        finally:
            self._hub_requests.release()

    def _token(self) -> str | None:
        token = self._settings.hf_token
        return None if token is None else token.get_secret_value()


def _admit_local_model(folder: Path, request: JobRequest, limits: Quotas) -> None:
    name = request.model_id
    try:
        with (folder / "config.json").open("rb") as stream:
            raw = stream.read(_MAX_CONFIG_BYTES + 1)
        if len(raw) > _MAX_CONFIG_BYTES:
            raise UnsupportedArchitectureError(f"the config.json of {name} is too large to be one")
        refuse_config(parse_config(raw, name), name)
        files = local_weight_files(folder, name)
        weights = sum_summaries(summarize(read_header(file, f"{name}/{file.name}")) for file in files)
    except OSError as error:
        raise ModelNotFoundError(
            f"a file of {name} cannot be read ({type(error).__name__}); ask the operator of this server"
        ) from error
    require_model_size(limits, weights)
    refuse_weights(weights, request.ratio, name)


def _admit_hub_model(request: JobRequest, token: str | None, limits: Quotas) -> None:
    repository = find_repository(request.model_id, request.revision, token=token, seconds=_HUB_SECONDS)
    name = "the model repository"
    refuse_config(parse_config(repository.read_config(), name), name)
    weights = repository.read_weights()
    require_model_size(limits, weights)
    if weights is not None:
        refuse_weights(weights, request.ratio, name)
