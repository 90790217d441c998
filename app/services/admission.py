"""Admission checks before a job is created: names that do not exist, unsuitable models.

`app.services.judge_process` does everything that reads a model's files or asks the Hub about them, in separate
processes. This module has their questions and limits, and handles processes that exceed them.
"""

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from huggingface_hub import constants, get_token
from pydantic import SecretStr, ValidationError

from app.services.questions import MAX_ANSWER_BYTES, NOT_CONFINED, Answer, Figures, HubQuestion, Judged, Question
from app.services.quotas import check_calibration_tokens, check_evaluation_tokens, check_healing_tokens
from app.services.tenant_semaphore import NoSlotError, TenantSemaphore
from app.shared.catalog import find_dataset, find_local_model
from app.shared.errors import BusyError, RateLimitedError
from app.shared.fork_server import ForkServer, ForkServerError
from app.shared.repositories.tenants import Quotas
from app.shared.requests import UPLOAD, JobRequest
from app.shared.settings import Settings
from rocket_core.errors import HubUnavailableError, ModelNotFoundError, UnsupportedArchitectureError

# Upper bounds on the time that a request waits for the Hub, or for a process to read files. The process may compute
# for less than half of the latter: a busy machine or a slow disk takes the rest.
_HUB_SECONDS = 10.0
_READ_SECONDS = 20.0
# Extra time for noticing that the Hub's own deadlines have passed.
_SLACK_SECONDS = 0.5
# How long a request waits for a slot, and how long its client should wait before the next one.
_SLOT_SECONDS = 10.0
_RETRY_SECONDS = 5
# Including those that wait, fewer than the threads for judging models: 40.
_HUB_SLOTS = {"most": 8, "most_of_one": 4, "waiting": 12, "waiting_of_one": 8}
_READ_SLOTS = {"most": 6, "most_of_one": 3, "waiting": 13, "waiting_of_one": 12}
# Environment variables that children need; many of the others are secret.
_ENVIRONMENT = ("PATH", "LANG", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR")
_ENVIRONMENT_PREFIXES = ("LC_", "HF_HUB_")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
_log = logging.getLogger(__name__)


def _environment() -> dict[str, str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name in _ENVIRONMENT or name.startswith(_ENVIRONMENT_PREFIXES)
    }
    # Without a token in the question, the Hub's client would look for one in this file.
    return {**inherited, "HF_TOKEN_PATH": os.devnull, "HF_HUB_DISABLE_TELEMETRY": "1"}


# One per process, as the template does not depend on settings.
_processes = ForkServer("app.services.judge_process:run", environment=_environment())


@contextmanager
def template_kept() -> Iterator[None]:
    """Start the process that judging processes are forked from, and keep it while the context is open."""
    _processes.hold()
    try:
        _processes.start()
    except ForkServerError as error:
        # The first request tries again, and its client gets the error.
        _log.error("no process can be started to read models: %s", error)
    try:
        yield
    finally:
        _processes.release()


def no_uploads(owner: str, name: str) -> Path:
    """Refuse the name of an uploaded model, in a service that accepts none."""
    del owner, name
    raise ModelNotFoundError("this service accepts no uploaded models; GET /models lists those it has")


class Admission:
    """Admission checks of requests.

    Args:
        settings: the operator's settings.
        find_uploaded: returns the folder with the headers of a tenant's uploaded model.
    """

    def __init__(self, settings: Settings, find_uploaded: Callable[[str, str], Path] = no_uploads) -> None:
        self._settings = settings
        self._find_uploaded = find_uploaded
        self._hub_slots = TenantSemaphore(**_HUB_SLOTS)
        self._read_slots = TenantSemaphore(**_READ_SLOTS)

    def admit(
        self, owner: str, request: JobRequest, limits: Quotas, hub_token: SecretStr | None = None
    ) -> tuple[str, ...]:
        """Refuse a request that no worker could carry out, or that exceeds its tenant's limits.

        Args:
            owner: the tenant.
            request: the job's request.
            limits: the tenant's quotas.
            hub_token: token for the Hub; None uses the operator's.

        Returns:
            Warnings that the client should see.

        Raises:
            HubUnavailableError: the Hub is unreachable; the same request may be admitted later.
            RateLimitedError: too many requests of the tenant are being judged.
            BusyError: too many requests of all tenants are being judged.
            OverQuotaError: the model or the calibration is too large.
            RocketError: the request is invalid; the code is that which the job would have failed with.
        """
        return self._judge(owner, request, limits, hub_token, is_estimate=False).warnings

    def estimate(self, owner: str, request: JobRequest, limits: Quotas, hub_token: SecretStr | None = None) -> Judged:
        """Do the same, and return what the request would take as well, if that can be determined in time."""
        return self._judge(owner, request, limits, hub_token, is_estimate=True)

    def _judge(
        self, owner: str, request: JobRequest, limits: Quotas, hub_token: SecretStr | None, *, is_estimate: bool
    ) -> Judged:
        if not request.reads_model:
            # Reads an artifact alone, which was judged by its report (`app.services.works`).
            return Judged()
        check_evaluation_tokens(limits, request.evaluate)
        for name in (*request.datasets, *request.local_tasks):
            if not name.startswith(UPLOAD):
                find_dataset(self._settings, name)
        folder = self._find_folder(owner, request)
        if not request.reads_calibration:
            # The model was judged with the job whose artifact is evaluated.
            return Judged()
        if request.options.calibrates:
            check_calibration_tokens(limits, request.calibration)
        check_healing_tokens(limits, request.options.heal_tokens)
        dataset = request.calibration.dataset
        if not dataset.startswith(UPLOAD):
            dataset = find_dataset(self._settings, dataset)
        with self._turn(owner, is_local=not request.is_on_hub):
            question = Question(
                request=request,
                dataset=dataset,
                folder=None if folder is None else str(folder),
                hub=self._hub_question(hub_token) if request.is_on_hub else None,
                model_bytes=limits.model_bytes,
                is_estimate=is_estimate,
                requires_isolation=self._settings.requires_isolation,
            )
            return _ask(question)

    def inspect(self, owner: str, request: JobRequest, limits: Quotas, folder: Path) -> Figures:
        """Refuse a model that no job could compress, whatever its calibration data; return what is known of it.

        Args:
            owner: the tenant.
            request: names the model, for messages.
            limits: the tenant's quotas.
            folder: config.json, index and headers of the model.

        Raises:
            RateLimitedError: too many requests of the tenant are being judged.
            BusyError: too many requests of all tenants are being judged.
            OverQuotaError: the model is too large.
            RocketError: the model cannot be compressed.
        """
        question = Question(
            request=request,
            dataset=request.calibration.dataset,
            folder=str(folder.resolve()),
            hub=None,
            model_bytes=limits.model_bytes,
            is_estimate=True,
            requires_isolation=self._settings.requires_isolation,
            lacks_data=True,
        )
        with self._turn(owner, is_local=True):
            figures = _ask(question).figures
        assert figures is not None, "an estimate of a local model is always available"
        return figures

    def _find_folder(self, owner: str, request: JobRequest) -> Path | None:
        if request.uploaded_model is not None:
            return self._find_uploaded(owner, request.uploaded_model).resolve()
        return None if request.is_on_hub else find_local_model(self._settings, request.model_id).resolve()

    @contextmanager
    def _turn(self, owner: str, *, is_local: bool) -> Iterator[None]:
        slots = self._read_slots if is_local else self._hub_slots
        try:
            with slots.acquire(owner, _SLOT_SECONDS):
                yield
        except NoSlotError as error:
            if not is_local:
                raise HubUnavailableError(
                    "too many requests are already waiting for the Hub; try again later"
                ) from error
            if error.is_own:
                raise RateLimitedError(
                    "too many concurrent requests from this tenant; send fewer at a time", retry_after=_RETRY_SECONDS
                ) from error
            raise BusyError("too many models are being read at once; try again later") from error

    def _hub_question(self, hub_token: SecretStr | None) -> HubQuestion:
        chosen = hub_token or self._settings.hf_token
        return HubQuestion(
            # If neither is given, the token of this machine's user.
            token=get_token() if chosen is None else chosen.get_secret_value(),
            endpoint=constants.ENDPOINT,
            is_offline=constants.HF_HUB_OFFLINE,
            seconds=_HUB_SECONDS,
            proxies={name: value for name, value in os.environ.items() if name.lower() in _PROXIES},
        )


def _ask(question: Question) -> Judged:
    try:
        answer = _answer(question)
    except ForkServerError as error:
        _log.error("no process can be started to read a model: %s", error)
        raise BusyError("models cannot be read now; try again later") from error
    if answer.fault:
        _log.warning("an unexpected error in a model's files: %s", " ".join(answer.fault))
    if answer.refusal is not None:
        raise answer.refusal.error()
    return answer.judged


def _answer(question: Question) -> Answer:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            child = _processes.fork([theirs.fileno()])
        with child:
            child.pid()
            # Only now: the template may have had to be started first.
            deadline = time.monotonic() + (_READ_SECONDS if question.hub is None else _HUB_SECONDS) + _SLACK_SECONDS
            try:
                raw = _exchange(ours, question.model_dump_json().encode(), deadline)
                # A process that has written its answer is done; for one that ended without, the exit code tells why.
                return Answer.model_validate_json(raw) if raw else _raise_lost(question, child.wait(_SLACK_SECONDS))
            except TimeoutError:
                _raise_timeout(question)
            except ValidationError:
                _log.warning("the answer of a process that read a model is invalid")
                _raise_lost(question, 0)


def _exchange(channel: socket.socket, question: bytes, deadline: float) -> bytes:
    answer = bytearray()
    try:
        channel.settimeout(_seconds_left(deadline))
        channel.sendall(question)
        channel.shutdown(socket.SHUT_WR)
        while len(answer) <= MAX_ANSWER_BYTES:
            channel.settimeout(_seconds_left(deadline))
            part = channel.recv(MAX_ANSWER_BYTES)
            if not part:
                return bytes(answer)
            answer += part
    except ConnectionError:
        return b""
    _log.warning("the answer of a process that read a model is too long")
    return b""


def _seconds_left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _raise_timeout(question: Question) -> NoReturn:
    if question.hub is not None:
        raise HubUnavailableError("the Hub does not respond to requests about the model repository; try again later")
    raise _too_much(question)


def _raise_lost(question: Question, exit_code: int) -> NoReturn:
    if exit_code == NOT_CONFINED:
        _log.error("a process to read a model could not be confined; standard error has the reason")
        raise BusyError("models cannot be read now; try again later")
    name = signal.Signals(-exit_code).name if -exit_code in set(signal.Signals) else str(exit_code)
    _log.warning("a process that read a model ended without an answer", extra={"exit_code": name})
    raise _too_much(question)


def _too_much(question: Question) -> UnsupportedArchitectureError:
    name = question.request.model_id if question.hub is None else "the model repository"
    return UnsupportedArchitectureError(
        f"reading the files of {name} takes too much memory or time; check its config.json and safetensors headers"
    )
