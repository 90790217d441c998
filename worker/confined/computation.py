"""Running the library for a job's attempt, with its callbacks turned into messages."""

from collections.abc import Callable
from contextlib import nullcontext
from logging import ERROR, getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from pydantic import TypeAdapter

from app.shared.logging import adopt_loggers, configure_logging, log_uncaught_errors, mask_secret
from app.shared.settings import Settings
from rocket_core.errors import CompressionCancelledError, ModelNotFoundError
from rocket_core.hub.repository import HubAccess
from rocket_core.system.energy import EnergyMeter
from rocket_core.system.gc_pause import no_collection
from worker.confined.messages import (
    CANCELLED,
    ComputeRequest,
    Evaluated,
    Failed,
    Finished,
    LogLevel,
    WorkRequest,
)
from worker.failures import failure_of
from worker.processes.channel import Channel, Message

if TYPE_CHECKING:
    from rocket_core.checkpoint import ModelSource
    from worker.confined.messenger import Messenger


Requested = TypeVar("Requested", bound=WorkRequest)


def receive_request(channel: Channel, kind: TypeAdapter[Requested]) -> Requested:
    """Return the attempt's request, and start logging."""
    request = channel.receive(kind)
    assert request is not None
    start_logging(request.log_level, request.token)
    return request


def send_outcome(channel: Channel, work: Callable[[], Message]) -> None:
    """Do the work, and send its result, or why it has none.

    Raises:
        ChannelError: the attempt has ended.
    """
    try:
        failure = failure_of(lambda: channel.send(work()), location=lambda: (None, None), hidden={})
    except CompressionCancelledError:
        channel.send(CANCELLED)
        return
    if failure is not None:
        channel.send(Failed.by(failure))


def start_logging(level: LogLevel, token: str | None) -> None:
    """Log lines that `worker.processes.output` reads, from a confined process, whose environment holds no settings."""
    if token is not None:
        mask_secret(token)
    configure_logging(Settings(log_level=level, log_format="json"))
    # It warns of each file whose mode it may not set; files have the mode that it would set.
    getLogger("huggingface_hub.file_download").setLevel(ERROR)
    log_uncaught_errors()


class Computation:
    """One run of the library.

    Args:
        channel: connection to the attempt.
        request: what to compute.
        should_cancel: called at every step; True ends the run.
        close_network: called when the Hub is no longer needed.
    """

    def __init__(
        self,
        channel: Channel,
        request: ComputeRequest,
        *,
        should_cancel: Callable[[], bool],
        close_network: Callable[[], object],
    ) -> None:
        self._channel = channel
        self._request = request
        self._should_cancel = should_cancel
        self._close_network = close_network
        # Loads at the same time as torch.
        self._meter = EnergyMeter() if request.measure_energy else None

    def run(self) -> None:
        """Compute, and send the outcome.

        Raises:
            ChannelError: the attempt has ended.
        """

        def work() -> Finished:
            self._work()
            return Finished()

        send_outcome(self._channel, work)

    def _work(self) -> None:
        from huggingface_hub.utils import disable_progress_bars

        # This process writes a log. Disabled before transformers is imported, which checks the setting only then.
        disable_progress_bars()
        with self._meter or nullcontext():
            with no_collection(lasting=True):
                import rocket_core.pipeline  # noqa: F401
            adopt_loggers()
            try:
                self._run_task()
            except PermissionError as error:
                self._refuse_unreadable(error)
                raise

    def _run_task(self) -> None:
        works = {
            "compression": self._compress,
            "profile": self._profile,
            "healing": self._heal,
            "evaluation": self._evaluate,
            "export": self._export,
            "help": self._help,
        }
        works[self._request.task]()

    def _refuse_unreadable(self, error: PermissionError) -> None:
        """Raise an error that says what to do if it is about a file of the model, whose owner may be another user."""
        folder = self._request.folder or Path(self._request.model)
        if error.filename is not None and Path(error.filename).is_relative_to(folder):
            raise ModelNotFoundError(
                f"{error.filename} cannot be read by the user that computes; ask the operator of this server to make "
                "the model readable: chmod -R a+rX"
            ) from error

    def _compress(self) -> None:
        from rocket_core.pipeline import compress

        compress(self._model(), self._request.output, self._request.config, **self._profiling())

    def _profile(self) -> None:
        from rocket_core.pipeline import profile_model

        options = self._profiling()
        options["observer"].on_profiled(
            profile_model(self._model(), self._request.output, self._request.config, **options)
        )

    def _heal(self) -> None:
        from rocket_core.pipeline import heal
        from rocket_core.pipeline.healing import HealedExport

        request = self._request
        assert request.artifact is not None
        assert request.config.healing is not None
        exports = tuple(kind for kind in get_args(HealedExport) if kind in request.config.export)
        heal(
            request.artifact,
            request.output,
            request.config.healing,
            model=self._model(),
            exports=exports,
            **self._resuming(),
        )

    def _evaluate(self) -> None:
        from rocket_core.pipeline import evaluate_artifact

        request = self._request
        assert request.artifact is not None
        options = self._from_hub()
        report = evaluate_artifact(self._model(), request.artifact, request.output, request.config, **options)
        options["observer"].insist(Evaluated(report=report))

    def _export(self) -> None:
        from rocket_core.pipeline.later_export import export_result

        request = self._request
        assert request.artifact is not None
        assert request.export_to is not None
        export_result(request.artifact, request.output, request.export_to, observer=self._observer())

    def _help(self) -> None:
        from rocket_core.checkpoint import find_model
        from rocket_core.pipeline.devices.helping import help_run

        model = self._model()
        request = self._request
        help_run(
            find_model(model) if isinstance(model, str) else model,
            request.output,
            device=request.config.device,
            observer=self._observer(),
        )

    def _from_hub(self) -> dict[str, Any]:
        """Return the arguments of all work that may read the Hub."""
        hub = HubAccess(token=self._request.token)
        return {"revision": self._request.revision, "hub": hub, "observer": self._observer()}

    def _resuming(self) -> dict[str, Any]:
        """Return the arguments of work that continues what an earlier attempt started."""
        return self._from_hub() | {"resume": True, "meter": self._meter, "download": self._request.download}

    def _profiling(self) -> dict[str, Any]:
        """Return the arguments of work that profiles layers."""
        from rocket_core.pipeline import ProfileCache

        cache = ProfileCache(self._request.profiles, quota_bytes=self._request.profiles_bytes)
        return self._resuming() | {"profiles": cache}

    def _model(self) -> "str | ModelSource":
        from rocket_core.checkpoint import ModelSource

        request = self._request
        if request.folder is None:
            return request.model
        return ModelSource(name=request.model, folder=request.folder, commit=request.commit)

    def _observer(self) -> "Messenger":
        from worker.confined.messenger import Messenger

        return Messenger(self._channel, should_cancel=self._should_cancel, close_network=self._close_network)
