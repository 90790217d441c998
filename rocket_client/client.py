"""`Rocket`: a blocking client of the service."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import JsonValue

from rocket_client import _endpoints
from rocket_client._account import Account
from rocket_client._defaults import LASTING_PATIENCE, PATIENCE, address_and_key, noop
from rocket_client._download import choose_artifacts, fetch_artifacts, nothing_to_download
from rocket_client._download_state import DownloadedFile, DownloadProgress, DownloadRequest
from rocket_client._events import follow_events
from rocket_client._later_work import LaterWork
from rocket_client._paths import job_path, target
from rocket_client._transport import Transport
from rocket_client._wire import RetryNotice
from rocket_client.models import (
    Artifact,
    Estimate,
    Event,
    Frontier,
    Job,
    JobPage,
    Layer,
    PredictedAllocation,
    Profile,
    ProfilePage,
    Progress,
)
from rocket_core.report.schema import CompressionReport


class Rocket(Account, LaterWork):
    """A client of the service.

    While the server does not answer or is busy, requests are retried with exponential backoff, or at the intervals that
    the server asks for. No request takes effect twice.

    Example:
        with Rocket("http://127.0.0.1:8000") as rocket:
            job = rocket.submit("local/tiny-llama", ratio=0.3)
            for event in rocket.events(job.id):
                print(event)
            rocket.download(job.id, Path("out"))

    Args:
        server: the server's address; None takes the environment variable ROCKET_SERVER, or this machine's port 8000.
        api_key: the API key from the server's operator; None takes the environment variable ROCKET_API_KEY, if set. It
            is sent only to this server.
        patience: seconds without an answer after which a request fails, >= 0.
        on_retry: called before each wait for the server.

    Raises:
        InvalidArgumentError: the address or the key is not valid.
    """

    def __init__(
        self,
        server: str | None = None,
        *,
        api_key: str | None = None,
        patience: float = PATIENCE,
        on_retry: Callable[[RetryNotice], None] = noop,
    ) -> None:
        address, key = address_and_key(server, api_key)
        self._transport = Transport(address, patience=patience, on_retry=on_retry, api_key=key)

    @property
    def server(self) -> str:
        """The server's address."""
        return self._transport.server

    def close(self) -> None:
        """Close all connections."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(
        self,
        model_id: str,
        *,
        ratio: float | None = None,
        target_bytes: int | None = None,
        bits: float | None = None,
        revision: str | None = None,
        calibration: Mapping[str, JsonValue] | None = None,
        evaluate: Mapping[str, JsonValue] | None = None,
        benchmark: bool = False,
        options: Mapping[str, JsonValue] | None = None,
        metadata: Mapping[str, str] | None = None,
        queue: str | None = None,
        idempotency_key: str | None = None,
        hub_token: str | None = None,
    ) -> Job:
        """Submit a compression job; omitted arguments take the server's defaults.

        Args:
            model_id: `namespace/name` on the Hub, or `local/NAME` from `models`.
            ratio: fraction of the compressible parameters to remove, [0, 1).
            target_bytes: most bytes that the artifact for the engine may take, instead of a ratio.
            bits: most bits per weight that the compressible layers may take, (0, 16], instead of a ratio.
            revision: branch, tag or commit of a repository on the Hub.
            calibration: `dataset`, `samples`, `sequence_length`, `seed`.
            evaluate: how to compare the result with the dense model: `dataset`, `samples`, `sequence_length`,
                `stride`, `tasks`, `task_items`, `prompts`, `answer_tokens`; empty takes all defaults, None skips the
                comparison.
            benchmark: whether to measure speed and memory of the original and of each artifact.
            options: settings of the method, such as `objective`, `ignore` and `export`.
            metadata: your own labels.
            queue: queue of the job, `cpu` or `gpu`.
            idempotency_key: a second request with the same key returns the job of the first; None generates a key, so
                that a request whose answer is lost does not create a second job.
            hub_token: a token of the Hugging Face Hub, for private repositories; deleted when the job ends.

        Raises:
            InvalidArgumentError: not exactly one of ratio, target_bytes and bits is given, or it is not a number.
            ProblemError: the server refuses the request.
        """
        settings: dict[str, object] = {"revision": revision, "calibration": calibration, "evaluate": evaluate}
        settings |= {"benchmark": benchmark, "options": options, "metadata": metadata, "queue": queue}
        settings |= target(ratio, target_bytes, bits, options)
        call = _endpoints.submit(model_id, settings, idempotency_key=idempotency_key, hub_token=hub_token)
        return self._transport.call(call)

    def profile(
        self,
        model_id: str,
        *,
        revision: str | None = None,
        calibration: Mapping[str, JsonValue] | None = None,
        options: Mapping[str, JsonValue] | None = None,
        metadata: Mapping[str, str] | None = None,
        queue: str | None = None,
        idempotency_key: str | None = None,
        hub_token: str | None = None,
    ) -> Job:
        """Submit a job that only profiles a model: its `profile_id` then gives predictions for any ratio.

        A later `submit` with the same model, calibration and options reuses the profile. Arguments and errors are those
        of `submit`.
        """
        settings: dict[str, object] = {"revision": revision, "calibration": calibration, "options": options}
        settings |= {"metadata": metadata, "queue": queue}
        call = _endpoints.profile(model_id, settings, idempotency_key=idempotency_key, hub_token=hub_token)
        return self._transport.call(call)

    def estimate(
        self,
        model_id: str,
        *,
        ratio: float | None = None,
        target_bytes: int | None = None,
        bits: float | None = None,
        revision: str | None = None,
        calibration: Mapping[str, JsonValue] | None = None,
        evaluate: Mapping[str, JsonValue] | None = None,
        benchmark: bool = False,
        options: Mapping[str, JsonValue] | None = None,
        hub_token: str | None = None,
    ) -> Estimate:
        """Return what a job would take, without creating it; arguments and errors are those of `submit`."""
        settings: dict[str, object] = {"revision": revision, "calibration": calibration, "evaluate": evaluate}
        settings |= {"benchmark": benchmark, "options": options} | target(ratio, target_bytes, bits, options)
        return self._transport.call(_endpoints.estimate(model_id, settings, hub_token=hub_token))

    def get_job(self, job_id: str) -> Job:
        """Return the current state of a job."""
        return self._transport.call(_endpoints.get_job(job_id))

    def wait(
        self,
        job_id: str,
        *,
        patience: float = LASTING_PATIENCE,
        on_news: Callable[[Event | Progress], None] = noop,
    ) -> Job:
        """Wait until a job has ended, also while the server restarts, and return it.

        Args:
            job_id: the job.
            patience: seconds without an answer from the server before giving up.
            on_news: called with everything that `events` yields.
        """
        for news in self.events(job_id, patience=patience):
            on_news(news)
        return self._transport.call(_endpoints.get_job(job_id), patience=patience)

    def list_jobs(
        self,
        *,
        status: str | None = None,
        metadata: Mapping[str, str] | None = None,
        after: str | None = None,
        limit: int = 20,
    ) -> JobPage:
        """Return a page of jobs, newest first.

        Args:
            status: only jobs with this status.
            metadata: only jobs with all of these labels.
            after: id of the last job already seen.
            limit: most jobs to return, 1 to 100.
        """
        return self._transport.call(_endpoints.list_jobs(status=status, metadata=metadata, after=after, limit=limit))

    def iterate_jobs(
        self, *, status: str | None = None, metadata: Mapping[str, str] | None = None, after: str | None = None
    ) -> Iterator[Job]:
        """Yield all jobs, newest first, fetched page by page; arguments are those of `list_jobs`."""
        while True:
            page = self.list_jobs(status=status, metadata=metadata, after=after, limit=_endpoints.PAGE)
            yield from page.data
            if not page.has_more or page.last_id is None:
                return
            after = page.last_id

    def cancel(self, job_id: str) -> Job:
        """Cancel a job: immediately if it is queued, as soon as its worker notices if it is running (`cancelling`)."""
        return self._transport.call(_endpoints.cancel(job_id))

    def retry(self, job_id: str, *, hub_token: str | None = None) -> Job:
        """Retry a job that failed or was cancelled, as a new job that resumes from its checkpoints.

        Args:
            job_id: the job.
            hub_token: as in `submit`; the job's own token was deleted when it ended.
        """
        return self._transport.call(_endpoints.retry(job_id, hub_token=hub_token))

    def delete(self, job_id: str) -> None:
        """Delete a job that has ended, with its artifacts."""
        self._transport.send(_endpoints.delete(job_id))

    def events(self, job_id: str, *, after: int = 0, patience: float = LASTING_PATIENCE) -> Iterator[Event | Progress]:
        """Follow a job until it ends, also while the server restarts.

        Args:
            job_id: the job.
            after: number of the last event already seen.
            patience: seconds without an answer from the server before giving up.

        Yields:
            Events, each once and in order, and the progress whenever it changes.
        """
        path = job_path(job_id, "events")
        return follow_events(self._transport, path, after=after, patience=patience)

    def layers(self, job_id: str) -> tuple[Layer, ...]:
        """Return the layers profiled so far, in the order of the model."""
        return self._transport.call(_endpoints.layers(job_id)).data

    def list_profiles(self, *, after: str | None = None, limit: int = 20) -> ProfilePage:
        """Return a page of at most `limit` profiles, newest first, from the one after `after`."""
        return self._transport.call(_endpoints.list_profiles(after=after, limit=limit))

    def get_profile(self, profile_id: str) -> Profile:
        """Return a profile; a job's profile has the id `Job.profile_id`."""
        return self._transport.call(_endpoints.get_profile(profile_id))

    def frontier(self, profile_id: str) -> Frontier:
        """Return size and predicted error of a profiled model at every hundredth up to the largest reachable ratio."""
        return self._transport.call(_endpoints.frontier(profile_id))

    def allocate(
        self,
        profile_id: str,
        *,
        ratio: float | None = None,
        model_bytes: int | None = None,
        bits: float | None = None,
        error: float | None = None,
    ) -> PredictedAllocation:
        """Predict the allocation for exactly one of ratio, model_bytes, bits and error, without creating a job.

        Args:
            profile_id: the profile.
            ratio: fraction to remove, [0, 1).
            model_bytes: most bytes that all weights may take.
            bits: most bits per weight that the compressible layers may take, (0, 16].
            error: upper bound on the predicted error.

        Raises:
            InvalidArgumentError: not exactly one of them is given, or it is not a number.
            ProblemError: no choice of candidates reaches the target.
        """
        call = _endpoints.allocate(profile_id, ratio=ratio, model_bytes=model_bytes, bits=bits, error=error)
        return self._transport.call(call)

    def delete_profile(self, profile_id: str) -> None:
        """Delete a profile; the jobs that created or used it are kept."""
        self._transport.send(_endpoints.delete_profile(profile_id))

    def report(self, job_id: str) -> CompressionReport:
        """Return the report of a job that has succeeded."""
        return self._transport.call(_endpoints.report(job_id))

    def artifacts(self, job_id: str) -> tuple[Artifact, ...]:
        """Return the artifacts of a job; empty unless it has succeeded."""
        return self._transport.call(_endpoints.artifacts(job_id)).data

    def download(
        self,
        job_id: str,
        folder: Path,
        *,
        exports: Sequence[str] = (),
        patience: float = LASTING_PATIENCE,
        on_progress: Callable[[DownloadProgress], None] = noop,
    ) -> list[DownloadedFile]:
        """Download the artifacts of a job into a folder; called again, it resumes.

        Args:
            job_id: a job that has succeeded.
            folder: target folder; created if necessary.
            exports: only these exports (such as `factored`), and the files outside of any export; empty takes all.
            patience: seconds without a byte before giving up.
            on_progress: called after each chunk.

        Returns:
            The files, each verified by its hash.

        Raises:
            DownloadError: the artifacts do not exist, do not fit on the disk or are not what the server announced.
            OSError: a file cannot be written.
        """
        artifacts = self.artifacts(job_id)
        if not artifacts:
            raise nothing_to_download(self.get_job(job_id))
        request = DownloadRequest(
            path=job_path(job_id, "artifacts"),
            artifacts=choose_artifacts(job_id, artifacts, exports),
            folder=folder,
            patience=patience,
            on_progress=on_progress,
        )
        return fetch_artifacts(self._transport, request)
