"""`Rocket`: a blocking client of the service."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from rocket_client._connections import BlockingConnections
from rocket_client._defaults import LASTING_PATIENCE, PATIENCE, noop
from rocket_client._wire import RetryNotice
from rocket_client.async_client import AsyncRocket
from rocket_client.models import Event, Job, Progress

Arguments = ParamSpec("Arguments")
Item = TypeVar("Item")
Result = TypeVar("Result")


class _Coroutines(AsyncRocket):
    """The asynchronous client with connections that block, so that its coroutines never suspend."""

    _connections = BlockingConnections


def _result(waiting: Awaitable[Result]) -> Result:
    """Return the result of a coroutine that never suspends; no event loop is needed, and one may be running."""
    try:
        next(waiting.__await__())
    except StopIteration as end:
        result: Result = end.value
        return result
    raise AssertionError("a coroutine with blocking connections never suspends")


def _blocking(
    method: Callable[Concatenate[AsyncRocket, Arguments], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate["Rocket", Arguments], Result]:
    """Return the blocking method for a method of the asynchronous client, with its signature and docstring."""

    @wraps(method)
    def call(self: "Rocket", /, *arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        return _result(method(self._client, *arguments, **options))

    return call


def _iterate(items: AsyncIterator[Item]) -> Iterator[Item]:
    """Yield what an asynchronous generator yields."""
    assert isinstance(items, AsyncGenerator)
    try:
        while True:
            yield _result(anext(items))
    except StopAsyncIteration:
        return
    finally:
        _result(items.aclose())


class Rocket:
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
        api_key: the API key from the server's operator; None takes the environment variable ROCKET_API_KEY, if set, and
            an empty one sends none. It is sent only to this server.
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
        self._client = _Coroutines(server, api_key=api_key, patience=patience, on_retry=on_retry)

    @property
    def server(self) -> str:
        """The server's address."""
        return self._client.server

    close = _blocking(AsyncRocket.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def iterate_jobs(
        self, *, status: str | None = None, metadata: Mapping[str, str] | None = None, after: str | None = None
    ) -> Iterator[Job]:
        """Yield all jobs, newest first, fetched page by page; arguments are those of `list_jobs`."""
        return _iterate(self._client.iterate_jobs(status=status, metadata=metadata, after=after))

    def events(self, job_id: str, *, after: int = 0, patience: float = LASTING_PATIENCE) -> Iterator[Event | Progress]:
        """Follow a job until it ends, also while the server restarts.

        Args:
            job_id: the job.
            after: number of the last event already seen.
            patience: seconds without an answer from the server before giving up.

        Yields:
            Events, each once and in order, and the progress whenever it changes.
        """
        return _iterate(self._client.events(job_id, after=after, patience=patience))

    submit = _blocking(AsyncRocket.submit)
    profile = _blocking(AsyncRocket.profile)
    estimate = _blocking(AsyncRocket.estimate)
    get_job = _blocking(AsyncRocket.get_job)
    wait = _blocking(AsyncRocket.wait)
    list_jobs = _blocking(AsyncRocket.list_jobs)
    cancel = _blocking(AsyncRocket.cancel)
    retry = _blocking(AsyncRocket.retry)
    delete = _blocking(AsyncRocket.delete)
    layers = _blocking(AsyncRocket.layers)
    list_profiles = _blocking(AsyncRocket.list_profiles)
    get_profile = _blocking(AsyncRocket.get_profile)
    frontier = _blocking(AsyncRocket.frontier)
    allocate = _blocking(AsyncRocket.allocate)
    delete_profile = _blocking(AsyncRocket.delete_profile)
    report = _blocking(AsyncRocket.report)
    artifacts = _blocking(AsyncRocket.artifacts)
    download = _blocking(AsyncRocket.download)

    upload = _blocking(AsyncRocket.upload)
    upload_model = _blocking(AsyncRocket.upload_model)
    delete_model = _blocking(AsyncRocket.delete_model)
    get_upload = _blocking(AsyncRocket.get_upload)
    delete_upload = _blocking(AsyncRocket.delete_upload)
    create_webhook = _blocking(AsyncRocket.create_webhook)
    list_webhooks = _blocking(AsyncRocket.list_webhooks)
    get_webhook = _blocking(AsyncRocket.get_webhook)
    test_webhook = _blocking(AsyncRocket.test_webhook)
    delete_webhook = _blocking(AsyncRocket.delete_webhook)
    list_models = _blocking(AsyncRocket.list_models)
    models = _blocking(AsyncRocket.models)
    calibrations = _blocking(AsyncRocket.calibrations)

    heal = _blocking(AsyncRocket.heal)
    evaluate = _blocking(AsyncRocket.evaluate)
    evaluations = _blocking(AsyncRocket.evaluations)
    export = _blocking(AsyncRocket.export)
    exports = _blocking(AsyncRocket.exports)
    push = _blocking(AsyncRocket.push)
    pushes = _blocking(AsyncRocket.pushes)
    create_link = _blocking(AsyncRocket.create_link)
    get_link = _blocking(AsyncRocket.get_link)
    delete_link = _blocking(AsyncRocket.delete_link)
