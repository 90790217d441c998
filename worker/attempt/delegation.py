"""An attempt's side of the conversation with its processes: starting them, checking their messages, ending them."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter

from app.shared.confinement import Sandbox
from app.shared.repositories import outputs, works
from rocket_core.allocation.loss_search import MOST_ROUNDS
from rocket_core.config import STAGES, Stage
from rocket_core.errors import CompressionCancelledError
from rocket_core.report.healing import HealingPoint
from rocket_core.report.push import PushReport
from worker.attempt.artifacts import check_evaluation
from worker.attempt.folders import JobFolders
from worker.attempt.writer import ProgressWriter, Step
from worker.confined.confinement import Confinement
from worker.confined.messages import (
    CANCELLED,
    FROM_COMPUTE,
    FROM_FETCH,
    FROM_PUSH,
    Acknowledged,
    Advanced,
    Allocated,
    ComputeRequest,
    Costed,
    Downloaded,
    Evaluated,
    Failed,
    FetchRequest,
    Finished,
    FromCompute,
    Healed,
    LayerProfiled,
    ModelProfiled,
    Required,
    Transferred,
    Uploaded,
    UploadRequest,
)
from worker.failures import ReportedError, ended, internal_error, lost, reported
from worker.processes.channel import ChannelClosedError, ChannelError, Message
from worker.processes.children import COMPUTE_PROGRAM, FETCH_PROGRAM, PUSH_PROGRAM, Child, Launcher
from worker.processes.environment import confined_environment, named_paths
from worker.processes.isolation import Isolation
from worker.processes.limits import ProcessLimits

Received = TypeVar("Received")
Last = TypeVar("Last", Downloaded, Uploaded)

# How soon a request to stop is noticed.
_LOOK_SECONDS = 0.1
# How soon a full disk is noticed.
_DISK_SECONDS = 0.5
# A signal to stop may reach a process slightly before it reaches the attempt.
_STOP_SECONDS = 2.0
# Stages that a later attempt starts again: a process in them need not be waited for.
_UNKEPT = frozenset({"downloading", "preflight", "evaluating"})
# Less than the progress that a run reports first after its download.
_DOWNLOAD_SHARE = 0.04
# Several times as many as a loss curve has.
_MOST_POINTS = 1000
UPLOADING = "uploading"
"""The stage of a push in which its files are sent."""
_log = logging.getLogger(__name__)


class Delegation:
    """Runner of an attempt's work in separate processes.

    Args:
        name: id of the job.
        folders: folders of the job.
        writer: writes what the processes report.
        stop: set when the processes must stop.
        launch: starts a process.
        isolation: how the processes are confined.
        limits: creates the limits of a process, by the folders that it writes to and the user that it becomes.
    """

    def __init__(
        self,
        name: str,
        folders: JobFolders,
        writer: ProgressWriter,
        stop: threading.Event,
        *,
        launch: Launcher,
        isolation: Isolation,
        limits: Callable[[Sequence[Path], int | None], ProcessLimits],
    ) -> None:
        self._name = name
        self._folders = folders
        self._writer = writer
        self._stop = stop
        self._launch = launch
        self._isolation = isolation
        self._limits = limits

    def download(self, request: FetchRequest) -> Downloaded:
        """Download a model in a separate process.

        Raises:
            CompressionCancelledError: the attempt must stop.
            ReportedError: the download failed.
        """
        request.cache.mkdir(parents=True, exist_ok=True)
        return self._transfer(FETCH_PROGRAM, request, FROM_FETCH, Downloaded, fetching, writable=(request.cache,))

    def push(self, request: UploadRequest) -> PushReport:
        """Push an artifact to the Hub in a separate process.

        Raises:
            CompressionCancelledError: the attempt must stop.
            ReportedError: the push failed.
        """
        return self._transfer(PUSH_PROGRAM, request, FROM_PUSH, Uploaded, _uploading, readable=(request.folder,)).report

    def compute(self, request: ComputeRequest, *, readable: Sequence[Path], network: bool) -> None:
        """Run the library on a job in a separate process.

        Args:
            request: what to compute.
            readable: files and folders that the process may read.
            network: whether text or tasks come from the Hub.

        Raises:
            CompressionCancelledError: the attempt must stop.
            ReportedError: the process failed.
            AppError: what it reported cannot be written.
            InsufficientMemoryError: the job needs more memory than any job may have.
        """
        conversation = _Conversation(self._writer, self._fail)
        self._run(
            COMPUTE_PROGRAM,
            request,
            FROM_COMPUTE,
            conversation.handle,
            readable=readable,
            writable=(self._folders.output, request.profiles),
            network=network,
            conversation=conversation,
        )

    def _transfer(
        self,
        program: Sequence[str],
        request: Message,
        kinds: TypeAdapter[Received],
        last: type[Last],
        step: Callable[[float], Step],
        *,
        readable: Sequence[Path] = (),
        writable: Sequence[Path] = (),
    ) -> Last:
        """Run a program that speaks to the Hub, and return its last message."""
        received: list[Last] = []

        def handle(message: Received, _child: Child) -> bool:
            if isinstance(message, Failed):
                self._fail(message)
            elif isinstance(message, last):
                received.append(message)
            elif isinstance(message, Transferred):
                self._writer.on_progress(step(message.share))
            return bool(received)

        self._writer.on_progress(step(0.0))
        self._run(program, request, kinds, handle, readable=readable, writable=writable, network=True)
        return received[0]

    def _run(
        self,
        program: Sequence[str],
        request: Message,
        kinds: TypeAdapter[Received],
        handle: Callable[[Received, Child], bool],
        *,
        readable: Sequence[Path] = (),
        writable: Sequence[Path] = (),
        network: bool,
        conversation: "_Conversation | None" = None,
    ) -> None:
        """Start a program and talk to it until it has finished; kill what is left of it."""
        self._folders.prepare()
        own = (self._folders.home, self._folders.temporary)
        environment = confined_environment(*own, network=network)
        sandbox = Sandbox(readable=(*named_paths(environment), *readable), writable=(*own, *writable), network=network)
        user = self._isolation.user_of(program)
        confinement = Confinement(sandbox=sandbox, required=self._isolation.is_required, user=user)
        if user is not None:
            self._folders.share(sandbox.writable, user)
        limits = self._limits(sandbox.writable, user)
        if conversation is not None:
            conversation.limits = limits
        try:
            child = self._started(program, environment, sandbox)
            try:
                if child.pid is not None:
                    limits.add(child.pid, is_raised=conversation is not None)
                child.channel.send(confinement)
                child.channel.send(request)
                self._converse(child, kinds, handle, limits, conversation)
                child.wait()
            except ChannelClosedError:
                raise self._lost(child, limits) from None
            except ChannelError as error:
                _log.error("a process of the job breaks the protocol: %s", error)
                raise ReportedError(internal_error()) from None
            finally:
                child.kill()
        finally:
            limits.remove()

    def _started(self, program: Sequence[str], environment: Mapping[str, str], sandbox: Sandbox) -> Child:
        try:
            return self._launch(program, environment, self._name, sandbox)
        # A thread that cannot be started, for its output, is a RuntimeError.
        except (OSError, RuntimeError) as error:
            _log.error("cannot start a process of the job: %s", error)
            raise ReportedError(lost("the job's process could not be started; see the worker's log")) from None

    def _converse(
        self,
        child: Child,
        kinds: TypeAdapter[Received],
        handle: Callable[[Received, Child], bool],
        limits: ProcessLimits,
        conversation: "_Conversation | None",
    ) -> None:
        asked_at: float | None = None
        checked_at = 0.0
        while True:
            if time.monotonic() - checked_at > _DISK_SECONDS:
                limits.check_disk()
                checked_at = time.monotonic()
            if self._stop.is_set() and asked_at is None:
                child.ask_to_stop()
                asked_at = time.monotonic()
            is_late = asked_at is not None and time.monotonic() - asked_at > _STOP_SECONDS
            if is_late and conversation is not None and conversation.stage in _UNKEPT:
                raise CompressionCancelledError("cancelled while the process of the job could not answer")
            message = child.channel.receive(kinds, seconds=_LOOK_SECONDS)
            if message is not None and handle(message, child):
                return

    def _lost(self, child: Child, limits: ProcessLimits) -> Exception:
        ending = child.wait()
        if self._stop.is_set():
            # It ended before it could read the message, or while it was stopping.
            return CompressionCancelledError("cancelled before the process of the job could say so")
        return ReportedError(ended(ending.exit_code, last_words=ending.last_words, ran_out=limits.was_exceeded()))

    def _fail(self, message: Failed) -> None:
        if message.code == CANCELLED.code:
            # A process that stops without being asked must not return its job to the queue with the attempt uncounted.
            if self._stop.wait(_STOP_SECONDS):
                raise CompressionCancelledError(message.message)
            raise ReportedError(lost("the job's process stopped without being asked to; see the worker's log"))
        raise ReportedError(reported(message.code, message.message), is_logged=True)


class _Conversation:
    """Handler that writes the messages of a computing process to the database.

    Attributes:
        limits: limits of the process.
    """

    def __init__(self, writer: ProgressWriter, fail: Callable[[Failed], None]) -> None:
        self._writer = writer
        self._fail = fail
        self._stage = 0
        self._points = 0
        self._rounds = 0
        self._has_required = False
        self.limits: ProcessLimits | None = None

    @property
    def stage(self) -> Stage:
        """The current stage."""
        return STAGES[self._stage]

    def handle(self, message: FromCompute, child: Child) -> bool:
        """Write what a message reports, and answer it; return whether the process has finished."""
        match message:
            case Advanced():
                self._advance(message)
                return False
            case Finished():
                return True
            case Failed():
                self._fail(message)
            case Required():
                self._require(message.memory_bytes)
            case LayerProfiled():
                self._writer.write(outputs.save_layer_profile, message.position, message.profile)
            case ModelProfiled():
                self._writer.on_profiled(message.profile)
            case Allocated():
                self._writer.write(outputs.save_allocation, message.chosen)
            case Healed():
                self._heal(message.point)
            case Costed():
                self._writer.write(outputs.save_costs, message.stages)
            case Evaluated():
                check_evaluation(message.report)
                self._writer.write(works.save_report, message.report)
        child.channel.send(Acknowledged())
        return False

    def _require(self, memory_bytes: int) -> None:
        # Weights have not been read yet, so this is the number that the library computes from headers.
        if self._has_required or self._stage > STAGES.index("preflight"):
            raise ChannelError("requirements that are reported twice, or after the run has started")
        self._has_required = True
        assert self.limits is not None
        self.limits.raise_for(memory_bytes)

    def _heal(self, point: HealingPoint) -> None:
        # Each point is an event of the job; this limits their number.
        self._points += 1
        if self._points > _MOST_POINTS:
            raise ChannelError("a loss curve of too many points")
        self._writer.write(outputs.save_healing_point, point)

    def _advance(self, message: Advanced) -> None:
        stage = STAGES.index(message.stage)
        # Each change of stage is an event of the job; this limits the number of events.
        if stage < self._stage:
            self._rounds += 1
            if (self.stage, message.stage) != ("evaluating", "allocating") or self._rounds > MOST_ROUNDS:
                raise ChannelError("a run that goes back to an earlier stage")
        self._stage = stage
        self._writer.on_progress(message)


def fetching(share: float) -> Step:
    """Return the progress of fetching what a run reads, given the fraction that is here."""
    return Step(stage="downloading", layer=None, fraction=_DOWNLOAD_SHARE * share, seconds_left=None)


def _uploading(share: float) -> Step:
    fraction = _DOWNLOAD_SHARE + (1.0 - _DOWNLOAD_SHARE) * share
    return Step(stage=UPLOADING, layer=None, fraction=fraction, seconds_left=None)
