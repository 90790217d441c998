"""Structured logs: one line per event, with its request and job, and without secrets."""

import json
import logging
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType, TracebackType
from typing import TextIO

from app.shared.settings import Settings, deprecated_variables

_CONTEXT: ContextVar[dict[str, str]] = ContextVar("log_context")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
_MASK = "[secret]"
_TRACE_PREFIX = "  | "
_log = logging.getLogger(__name__)
# Secrets that this process has learnt since logging was configured.
_learnt_secrets: set[str] = set()


@contextmanager
def log_context(**fields: str) -> Iterator[None]:
    """Add fields, such as `request_id` and `job_id`, to every line logged in the context."""
    token = _CONTEXT.set({**_CONTEXT.get({}), **fields})
    try:
        yield
    finally:
        _CONTEXT.reset(token)


def current_request_id() -> str | None:
    """Return the id of the request being served, if any."""
    return _CONTEXT.get({}).get("request_id")


def mask_secret(secret: str) -> None:
    """Mask a secret in all that this process logs from now on."""
    _learnt_secrets.add(secret)


def configure_logging(settings: Settings, stream: TextIO | None = None, **fields: str) -> None:
    """Send every log line of this process, and every Python warning, to one stream.

    Args:
        settings: level and format.
        stream: the target; None for standard error.
        fields: fields of every line, in all threads.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    formatter = StructuredFormatter(as_json=settings.log_format == "json", secrets=settings.secrets(), fields=fields)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.log_level.upper())
    logging.captureWarnings(True)
    # Celery logs two lines per message and Alembic one per plugin; silence both.
    for noisy in ("celery.worker.strategy", "celery.app.trace", "alembic.runtime.plugins"):
        logging.getLogger(noisy).setLevel(max(root.level, logging.WARNING))
    for old, new in deprecated_variables():
        _log.warning("%s is deprecated; set %s instead", old, new)


def adopt_loggers() -> None:
    """Remove the handlers of libraries imported so far, so that their records go to the root logger."""
    for logger in list(logging.getLogger().manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            logger.handlers.clear()
            logger.propagate = True


def log_uncaught_errors() -> None:
    """Log errors that end this process, or one of its threads, like everything else."""

    def on_process_end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _log.critical("the process ends because of an error", exc_info=(kind, error, trace))

    def on_thread_end(ended: threading.ExceptHookArgs) -> None:
        if ended.exc_value is not None:
            _log.critical(
                "a thread ends because of an error", exc_info=(ended.exc_type, ended.exc_value, ended.exc_traceback)
            )

    sys.excepthook = on_process_end
    threading.excepthook = on_thread_end


class StructuredFormatter(logging.Formatter):
    """Formatter with one line per record: JSON, or text for humans.

    Args:
        as_json: JSON rather than text.
        secrets: strings that are masked wherever they occur, in messages, fields and tracebacks alike.
        fields: fields of every line.
    """

    def __init__(
        self, *, as_json: bool, secrets: Iterable[str] = (), fields: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        super().__init__()
        self._fields = fields
        self._as_json = as_json
        self._secrets = tuple(secrets)

    def format(self, record: logging.LogRecord) -> str:
        """Format a record."""
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._fields,
            **_CONTEXT.get({}),
            **{name: value for name, value in vars(record).items() if name not in _STANDARD},
        }
        if record.exc_info:
            fields["trace"] = self.formatException(record.exc_info)
        line = json.dumps(fields, default=str) if self._as_json else _text(fields)
        for secret in (*self._secrets, *_learnt_secrets):
            line = line.replace(secret, _MASK)
        return line


def _text(fields: dict[str, object]) -> str:
    head = f"{fields.pop('time')} {fields.pop('level'):<7} {fields.pop('logger')}: {fields.pop('message')}"
    trace = fields.pop("trace", None)
    line = " ".join([_escape(head), *(_escape(f"{name}={value!r}") for name, value in fields.items())])
    if trace is None:
        return line
    # The prefix distinguishes these lines from those that start with a time.
    return "\n".join([line, *(_TRACE_PREFIX + _escape(part) for part in str(trace).split("\n"))])


def _escape(text: str) -> str:
    """Replace every character that could break a line or control a terminal, so that no value can forge a line."""
    if text.isprintable():
        return text
    # Lone surrogates are not printable either; writing one to a UTF-8 stream would fail.
    return "".join(part if part.isprintable() else part.encode("unicode_escape").decode() for part in text)
