"""Process that pushes an artifact to the Hub, without loading it.

    python -m worker.confined.push DESCRIPTOR PARENT JOB

It has network access, a Hub token with write access and the artifact, but no other secrets and no other files.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from worker.confined.compute import main
from worker.confined.confinement import start_confined
from worker.processes.channel import Channel

if TYPE_CHECKING:
    from rocket_core.report.push import PushReport
    from worker.confined.messages import UploadRequest

# How often progress is reported, and a request to stop is noticed.
_LOOK_SECONDS = 0.5


def run(channel: Channel) -> None:
    """Confine this process and push an artifact.

    Raises:
        ChannelError: the attempt has ended.
    """
    _confinement, stop = start_confined(channel)
    # Imported here because it starts threads, which would not be confined if they were started earlier.
    from worker.confined.computation import receive_request
    from worker.confined.messages import UPLOAD_REQUEST

    push(channel, receive_request(channel, UPLOAD_REQUEST), should_cancel=stop.is_set)


def push(channel: Channel, request: "UploadRequest", *, should_cancel: Callable[[], bool]) -> None:
    """Push an artifact, and send the outcome.

    Args:
        channel: connection to the attempt.
        request: the artifact, and where to push it.
        should_cancel: called repeatedly; True ends the push.
    """
    from worker.confined.computation import send_outcome
    from worker.confined.messages import Transferred, Uploaded

    sent = _Sent()
    pool = ThreadPoolExecutor(1, thread_name_prefix="push")

    def work() -> Uploaded:
        # In another thread, so that a Hub that hangs does not keep this one from stopping.
        upload = pool.submit(_upload, request, sent)
        _watch(upload, sent, lambda share: channel.send(Transferred(share=share)), should_cancel)
        return Uploaded(report=upload.result())

    try:
        send_outcome(channel, work)
    finally:
        sent.stop()
        pool.shutdown(wait=False)


def _upload(request: "UploadRequest", sent: "_Sent") -> "PushReport":
    from rocket_core.hub.upload import HubDestination, HubRepository
    from rocket_core.report.push import PushReport

    paths = sorted(path for path in request.folder.rglob("*") if path.is_file())
    files = [(path.relative_to(request.folder).as_posix(), path) for path in paths]
    sent.total = sum(path.stat().st_size for path in paths)
    repository = HubRepository(
        HubDestination(repository=request.repository, token=request.token, private=request.private)
    )
    repository.create()
    pushed = repository.commit(files, request.message, on_sent=sent.on_file)
    made = {"export": request.folder.name, "files": len(files), "size": sent.total}
    return PushReport.model_validate(asdict(pushed) | made)


def _watch(
    upload: "Future[PushReport]", sent: "_Sent", on_step: Callable[[float], None], should_cancel: Callable[[], bool]
) -> None:
    from rocket_core.errors import CompressionCancelledError

    told = 0.0
    with sent.counted_bars():
        while not wait((upload,), timeout=_LOOK_SECONDS).done:
            if should_cancel():
                raise CompressionCancelledError("cancelled while pushing")
            # Only when more has been sent, so that a watchdog can detect a push that hangs.
            if sent.share > told:
                told = sent.share
                on_step(told)


class _Sent:
    """Bytes that have been sent, counted by the thread of a push and read by another one.

    Attributes:
        total: bytes of all files; 0 while unknown.
    """

    def __init__(self) -> None:
        self.total = 0
        self._complete = 0
        self._current: dict[int, float] = {}
        self._is_stopped = False

    @property
    def share(self) -> float:
        """Fraction of the bytes that has been sent, [0, 1]."""
        # One bar counts bytes read, another bytes sent; if both are used, one lags.
        current = max([*self._current.values()], default=0.0)
        return min(1.0, (self._complete + current) / self.total) if self.total else 0.0

    def on_file(self, size: int) -> None:
        """Record the bytes of all files that are complete."""
        self._complete, self._current = size, {}
        self._check()

    def stop(self) -> None:
        """Stop the push at the next piece that is sent."""
        self._is_stopped = True

    @contextmanager
    def counted_bars(self) -> Iterator[None]:
        """Count what the progress bars of the Hub's client report, and hide them; it offers no other way."""
        from huggingface_hub.utils import tqdm

        def start(bar: tqdm, *arguments: Any, **options: Any) -> None:
            original["__init__"](bar, *arguments, **options | {"disable": True})

        def update(bar: tqdm, n: float | None = 1) -> bool | None:
            self._check()
            self._current[id(bar)] = self._current.get(id(bar), 0.0) + (n or 0)
            return None

        replaced: Mapping[str, Any] = {"__init__": start, "update": update}
        original: Mapping[str, Any] = {name: getattr(tqdm, name) for name in replaced}
        try:
            for name, function in replaced.items():
                setattr(tqdm, name, function)
            yield
        finally:
            for name, function in original.items():
                setattr(tqdm, name, function)

    def _check(self) -> None:
        from rocket_core.errors import CompressionCancelledError

        if self._is_stopped:
            raise CompressionCancelledError("cancelled while pushing")


if __name__ == "__main__":
    main(run)
