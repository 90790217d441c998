"""`AsyncRocket`: an asynchronous client of the service."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import JsonValue

from rocket_client import _endpoints
from rocket_client._account import AsyncAccount
from rocket_client._defaults import LASTING_PATIENCE, PATIENCE, address_and_key, noop
from rocket_client._download import choose_artifacts, fetch_artifacts_async, nothing_to_download
from rocket_client._download_state import DownloadedFile, DownloadProgress, DownloadRequest
from rocket_client._events import follow_events_async
from rocket_client._later_work import AsyncLaterWork
from rocket_client._paths import job_path, target
from rocket_client._transport import AsyncTransport
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


class AsyncRocket(AsyncAccount, AsyncLaterWork):
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

    def __init__(
        self,
        server: str | None = None,
        *,
        api_key: str | None = None,
        patience: float = PATIENCE,
        on_retry: Callable[[RetryNotice], None] = noop,
    ) -> None:
        address, key = address_and_key(server, api_key)
        self._transport = AsyncTransport(address, patience=patience, on_retry=on_retry, api_key=key)

    @property
    def server(self) -> str:
        """The server's address."""
        return self._transport.server

    async def close(self) -> None:
        """See `Rocket.close`."""
        await self._transport.close()

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
        """See `Rocket.submit`."""
        settings: dict[str, object] = {
            "revision": revision,
            "calibration": calibration,
            "evaluate": evaluate,
            "benchmark": benchmark,
            "options": options,
            "metadata": metadata,
            "queue": queue,
        } | target(ratio, target_bytes, bits, options)
        call = _endpoints.submit(model_id, settings, idempotency_key=idempotency_key, hub_token=hub_token)
        return await self._transport.call(call)

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
        """See `Rocket.profile`."""
        settings = {
            "revision": revision,
            "calibration": calibration,
            "options": options,
            "metadata": metadata,
            "queue": queue,
        }
        call = _endpoints.profile(model_id, settings, idempotency_key=idempotency_key, hub_token=hub_token)
        return await self._transport.call(call)

    async def estimate(
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
        """See `Rocket.estimate`."""
        settings: dict[str, object] = {"revision": revision, "calibration": calibration, "evaluate": evaluate}
        settings |= {"benchmark": benchmark, "options": options} | target(ratio, target_bytes, bits, options)
        return await self._transport.call(_endpoints.estimate(model_id, settings, hub_token=hub_token))

    async def get_job(self, job_id: str) -> Job:
        """See `Rocket.get_job`."""
        return await self._transport.call(_endpoints.get_job(job_id))

    async def wait(
        self,
        job_id: str,
        *,
        patience: float = LASTING_PATIENCE,
        on_news: Callable[[Event | Progress], None] = noop,
    ) -> Job:
        """See `Rocket.wait`."""
        async for news in self.events(job_id, patience=patience):
            on_news(news)
        return await self._transport.call(_endpoints.get_job(job_id), patience=patience)

    async def list_jobs(
        self,
        *,
        status: str | None = None,
        metadata: Mapping[str, str] | None = None,
        after: str | None = None,
        limit: int = 20,
    ) -> JobPage:
        """See `Rocket.list_jobs`."""
        call = _endpoints.list_jobs(status=status, metadata=metadata, after=after, limit=limit)
        return await self._transport.call(call)

    async def iterate_jobs(
        self, *, status: str | None = None, metadata: Mapping[str, str] | None = None, after: str | None = None
    ) -> AsyncIterator[Job]:
        """See `Rocket.iterate_jobs`."""
        while True:
            page = await self.list_jobs(status=status, metadata=metadata, after=after, limit=_endpoints.PAGE)
            for job in page.data:
                yield job
            if not page.has_more or page.last_id is None:
                return
            after = page.last_id

    async def cancel(self, job_id: str) -> Job:
        """See `Rocket.cancel`."""
        return await self._transport.call(_endpoints.cancel(job_id))

    async def retry(self, job_id: str, *, hub_token: str | None = None) -> Job:
        """See `Rocket.retry`."""
        return await self._transport.call(_endpoints.retry(job_id, hub_token=hub_token))

    async def delete(self, job_id: str) -> None:
        """See `Rocket.delete`."""
        await self._transport.send(_endpoints.delete(job_id))

    def events(
        self, job_id: str, *, after: int = 0, patience: float = LASTING_PATIENCE
    ) -> AsyncIterator[Event | Progress]:
        """See `Rocket.events`."""
        path = job_path(job_id, "events")
        return follow_events_async(self._transport, path, after=after, patience=patience)

    async def layers(self, job_id: str) -> tuple[Layer, ...]:
        """See `Rocket.layers`."""
        return (await self._transport.call(_endpoints.layers(job_id))).data

    async def list_profiles(self, *, after: str | None = None, limit: int = 20) -> ProfilePage:
        """See `Rocket.list_profiles`."""
        return await self._transport.call(_endpoints.list_profiles(after=after, limit=limit))

    async def get_profile(self, profile_id: str) -> Profile:
        """See `Rocket.get_profile`."""
        return await self._transport.call(_endpoints.get_profile(profile_id))

    async def frontier(self, profile_id: str) -> Frontier:
        """See `Rocket.frontier`."""
        return await self._transport.call(_endpoints.frontier(profile_id))

    async def allocate(
        self,
        profile_id: str,
        *,
        ratio: float | None = None,
        model_bytes: int | None = None,
        bits: float | None = None,
        error: float | None = None,
    ) -> PredictedAllocation:
        """See `Rocket.allocate`."""
        call = _endpoints.allocate(profile_id, ratio=ratio, model_bytes=model_bytes, bits=bits, error=error)
        return await self._transport.call(call)

    async def delete_profile(self, profile_id: str) -> None:
        """See `Rocket.delete_profile`."""
        await self._transport.send(_endpoints.delete_profile(profile_id))

    async def report(self, job_id: str) -> CompressionReport:
        """See `Rocket.report`."""
        return await self._transport.call(_endpoints.report(job_id))

    async def artifacts(self, job_id: str) -> tuple[Artifact, ...]:
        """See `Rocket.artifacts`."""
        return (await self._transport.call(_endpoints.artifacts(job_id))).data

    async def download(
        self,
        job_id: str,
        folder: Path,
        *,
        exports: Sequence[str] = (),
        patience: float = LASTING_PATIENCE,
        on_progress: Callable[[DownloadProgress], None] = noop,
    ) -> list[DownloadedFile]:
        """See `Rocket.download`."""
        artifacts = await self.artifacts(job_id)
        if not artifacts:
            raise nothing_to_download(await self.get_job(job_id))
        request = DownloadRequest(
            path=job_path(job_id, "artifacts"),
            artifacts=choose_artifacts(job_id, artifacts, exports),
            folder=folder,
            patience=patience,
            on_progress=on_progress,
        )
        return await fetch_artifacts_async(self._transport, request)
