"""`AsyncRocket`: an asynchronous client of the service."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import JsonValue

from rocket_client._account import Account
from rocket_client._connections import AsyncConnections, Connections
from rocket_client._defaults import LASTING_PATIENCE, PATIENCE, address_and_key, noop
from rocket_client._download import DownloadedFile, choose_artifacts, fetch_artifacts, nothing_to_download
from rocket_client._events import follow_events
from rocket_client._later_work import LaterWork
from rocket_client._requests import job_path, prediction_target, profile_path, request_body, target, token_header
from rocket_client._transport import Transport
from rocket_client._wire import Call, RetryNotice, TransferProgress, Wire
from rocket_client.models import (
    Artifact,
    ArtifactList,
    Estimate,
    Event,
    Frontier,
    Job,
    JobPage,
    Layer,
    LayerList,
    PredictedAllocation,
    Profile,
    ProfilePage,
    Progress,
)
from rocket_core.report.schema import CompressionReport

# Page size for iterating over all resources.
_PAGE = 100


class AsyncRocket(Account, LaterWork):
    """A client of the service for asyncio: the methods of `Rocket` as coroutines, with the same arguments.

    Retries, errors and results are the same too; `events` and `iterate_jobs` are asynchronous iterators. Many calls may
    run concurrently. Files are read and written in threads.

    Example:
        async with AsyncRocket("http://127.0.0.1:8000") as rocket:
            job = await rocket.submit("local/tiny-llama", ratio=0.3)
            async for event in rocket.events(job.id):
                print(event)
            await rocket.download(job.id, Path("out"))

    Args:
        server: the server's address, with the same default as in `Rocket`.
        api_key: API key, with the same default as in `Rocket`.
        patience: seconds without an answer after which a request fails, >= 0.
        on_retry: called before each wait for the server; must not block.

    Raises:
        InvalidArgumentError: the address or the key is not valid.
    """

    _connections: type[Connections] = AsyncConnections

    def __init__(
        self,
        server: str | None = None,
        *,
        api_key: str | None = None,
        patience: float = PATIENCE,
        on_retry: Callable[[RetryNotice], None] = noop,
    ) -> None:
        address, key = address_and_key(server, api_key)
        wire = Wire(address, patience=patience, on_retry=on_retry, api_key=key)
        self._transport = Transport(wire, self._connections(wire.options))

    @property
    def server(self) -> str:
        """The server's address."""
        return self._transport.wire.server

    async def close(self) -> None:
        """Close all connections."""
        await self._transport.connections.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def submit(
        self,
        model_id: str,
        *,
        ratio: float | None = None,
        target_bytes: int | None = None,
        bits: float | None = None,
        fit: Mapping[str, JsonValue] | None = None,
        max_kl: float | None = None,
        max_perplexity_increase: float | None = None,
        revision: str | None = None,
        calibration: Mapping[str, JsonValue] | None = None,
        evaluate: Mapping[str, JsonValue] | None = None,
        accept: Mapping[str, float] | None = None,
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
            fit: the memory that weights, context and engine have to fit into, instead of a ratio: `memory_bytes`,
                `context` (tokens), and if wanted `batch` and `kv_bits`.
            max_kl: most KL divergence from the original that is measured, in nats per token, above 0, with files as
                small as possible, instead of a ratio.
            max_perplexity_increase: the same for the increase of the perplexity, a fraction above 0 and below 1.
            revision: branch, tag or commit of a repository on the Hub.
            calibration: `dataset`, `samples`, `sequence_length`, `seed`.
            evaluate: how to compare the result with the dense model: `dataset`, `samples`, `sequence_length`,
                `stride`, `tasks`, `task_items`, `prompts`, `answer_tokens`; empty takes all defaults, None skips the
                comparison.
            accept: bounds on what `evaluate` measures: `max_kl` (nats per token), `max_perplexity_increase`,
                `max_task_drop` (fractions); the job's `result.verdict` says whether they hold. None gives no verdict.
            benchmark: whether to measure speed and memory of the original and of each artifact.
            options: settings of the method, such as `objective`, `ignore` and `export`.
            metadata: your own labels.
            queue: queue of the job, `cpu` or `gpu`.
            idempotency_key: a second request with the same key returns the job of the first; None generates a key, so
                that a request whose answer is lost does not create a second job.
            hub_token: a token of the Hugging Face Hub, for private repositories; deleted when the job ends.

        Raises:
            InvalidArgumentError: not exactly one target (ratio, target_bytes, bits, fit, max_kl,
                max_perplexity_increase) is given, or it is not a number.
            ProblemError: the server refuses the request.
        """
        settings: dict[str, object] = {"revision": revision, "calibration": calibration, "evaluate": evaluate}
        settings |= {"accept": accept, "benchmark": benchmark, "options": options, "metadata": metadata, "queue": queue}
        given = {"ratio": ratio, "target_bytes": target_bytes, "bits": bits, "fit": fit, "max_kl": max_kl}
        settings |= target(given | {"max_perplexity_increase": max_perplexity_increase}, options)
        return await self._transport.create_job("/jobs", request_body(model_id, settings), idempotency_key, hub_token)

    async def profile(
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
        body = request_body(model_id, settings)
        return await self._transport.create_job("/profiles", body, idempotency_key, hub_token)

    async def estimate(
        self,
        model_id: str,
        *,
        ratio: float | None = None,
        target_bytes: int | None = None,
        bits: float | None = None,
        fit: Mapping[str, JsonValue] | None = None,
        max_kl: float | None = None,
        max_perplexity_increase: float | None = None,
        revision: str | None = None,
        calibration: Mapping[str, JsonValue] | None = None,
        evaluate: Mapping[str, JsonValue] | None = None,
        accept: Mapping[str, float] | None = None,
        benchmark: bool = False,
        options: Mapping[str, JsonValue] | None = None,
        hub_token: str | None = None,
    ) -> Estimate:
        """Return what a job would take, without creating it; arguments and errors are those of `submit`."""
        settings: dict[str, object] = {"revision": revision, "calibration": calibration, "evaluate": evaluate}
        settings |= {"accept": accept, "benchmark": benchmark, "options": options}
        given = {"ratio": ratio, "target_bytes": target_bytes, "bits": bits, "fit": fit, "max_kl": max_kl}
        settings |= target(given | {"max_perplexity_increase": max_perplexity_increase}, options)
        body, headers = request_body(model_id, settings), token_header(hub_token)
        return await self._transport.post(Estimate, "/estimates", body, headers=headers)

    async def get_job(self, job_id: str) -> Job:
        """Return the current state of a job."""
        return await self._transport.get(Job, job_path(job_id))

    async def wait(
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
        async for news in self.events(job_id, patience=patience):
            on_news(news)
        return await self._transport.call(Call(method="GET", path=job_path(job_id), answer=Job), patience=patience)

    async def list_jobs(
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
        labels = {f"metadata[{key}]": value for key, value in (metadata or {}).items()}
        params = {"status": status, "after": after, "limit": limit, **labels}
        return await self._transport.get(JobPage, "/jobs", params)

    async def iterate_jobs(
        self, *, status: str | None = None, metadata: Mapping[str, str] | None = None, after: str | None = None
    ) -> AsyncIterator[Job]:
        """Yield all jobs, newest first, fetched page by page; arguments are those of `list_jobs`."""
        while True:
            page = await self.list_jobs(status=status, metadata=metadata, after=after, limit=_PAGE)
            for job in page.data:
                yield job
            if not page.has_more or page.last_id is None:
                return
            after = page.last_id

    async def cancel(self, job_id: str) -> Job:
        """Cancel a job: immediately if it is queued, as soon as its worker notices if it is running (`cancelling`)."""
        return await self._transport.post(Job, job_path(job_id, "cancel"))

    async def retry(self, job_id: str, *, hub_token: str | None = None) -> Job:
        """Retry a job that failed or was cancelled, as a new job that resumes from its checkpoints.

        Args:
            job_id: the job.
            hub_token: as in `submit`; the job's own token was deleted when it ended.
        """
        return await self._transport.post(Job, job_path(job_id, "retry"), headers=token_header(hub_token))

    async def delete(self, job_id: str) -> None:
        """Delete a job that has ended, with its artifacts."""
        await self._transport.delete(job_path(job_id))

    def events(
        self, job_id: str, *, after: int = 0, patience: float = LASTING_PATIENCE
    ) -> AsyncIterator[Event | Progress]:
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

    async def layers(self, job_id: str) -> tuple[Layer, ...]:
        """Return the layers profiled so far, in the order of the model."""
        return (await self._transport.get(LayerList, job_path(job_id, "layers"))).data

    async def list_profiles(self, *, after: str | None = None, limit: int = 20) -> ProfilePage:
        """Return a page of at most `limit` profiles, newest first, from the one after `after`."""
        return await self._transport.get(ProfilePage, "/profiles", {"after": after, "limit": limit})

    async def get_profile(self, profile_id: str) -> Profile:
        """Return a profile; a job's profile has the id `Job.profile_id`."""
        return await self._transport.get(Profile, profile_path(profile_id))

    async def frontier(self, profile_id: str) -> Frontier:
        """Return size and predicted error of a profiled model at every hundredth up to the largest reachable ratio."""
        return await self._transport.get(Frontier, profile_path(profile_id, "frontier"))

    async def allocate(
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
        body = prediction_target({"ratio": ratio, "model_bytes": model_bytes, "bits": bits, "error": error})
        return await self._transport.post(PredictedAllocation, profile_path(profile_id, "allocations"), body)

    async def delete_profile(self, profile_id: str) -> None:
        """Delete a profile; the jobs that created or used it are kept."""
        await self._transport.delete(profile_path(profile_id))

    async def report(self, job_id: str) -> CompressionReport:
        """Return the report of a job that has succeeded."""
        return await self._transport.get(CompressionReport, job_path(job_id, "report"))

    async def artifacts(self, job_id: str) -> tuple[Artifact, ...]:
        """Return the artifacts of a job; empty unless it has succeeded."""
        return (await self._transport.get(ArtifactList, job_path(job_id, "artifacts"))).data

    async def download(
        self,
        job_id: str,
        folder: Path,
        *,
        exports: Sequence[str] = (),
        patience: float = LASTING_PATIENCE,
        on_progress: Callable[[TransferProgress], None] = noop,
    ) -> list[DownloadedFile]:
        """Download the artifacts of a job into a folder; called again, it resumes.

        Args:
            job_id: a job that has succeeded.
            folder: target folder; created if necessary.
            exports: only these exports (such as `rocket`), and the files outside of any export; empty takes all.
            patience: seconds without a byte before giving up.
            on_progress: called after each chunk.

        Returns:
            The files, each verified by its hash.

        Raises:
            DownloadError: the artifacts do not exist, do not fit on the disk or are not what the server announced.
            OSError: a file cannot be written.
        """
        artifacts = await self.artifacts(job_id)
        if not artifacts:
            raise nothing_to_download(await self.get_job(job_id))
        path, chosen = job_path(job_id, "artifacts"), choose_artifacts(job_id, artifacts, exports)
        return await fetch_artifacts(self._transport, path, chosen, folder, patience=patience, on_progress=on_progress)
