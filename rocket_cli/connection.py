"""Connection of commands to a server: outages, and refusals in terms of the command line."""

import difflib
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rocket_cli import options
from rocket_cli.exit_codes import reported_failures
from rocket_cli.progress_view import print_line
from rocket_client._defaults import COMMAND_PATIENCE, DEFAULT_SERVER, KEY_VARIABLE, SERVER_VARIABLE
from rocket_client.errors import ClientError, ProblemError
from rocket_core.report.formatting import duration_text

if TYPE_CHECKING:
    from rocket_client._wire import RetryNotice
    from rocket_client.client import Rocket

_MANY = 100
_NAMES_SHOWN = 12


class OutageNotice:
    """Notice that is printed once when the server does not answer, and once when it does again.

    Args:
        server: the server's address.
        quiet: whether to print nothing.
    """

    def __init__(self, server: str, *, quiet: bool) -> None:
        self._server = server
        self._quiet = quiet
        self._reason: str | None = None

    def begin(self, notice: "RetryNotice") -> None:
        """Note a missing answer."""
        if self._reason is None and not self._quiet:
            left = duration_text(round(notice.seconds_left))
            state = "is busy" if notice.has_answered else "does not answer"
            print_line(f"{self._server} {state} ({notice.reason}); retrying for {left}")
        self._reason = notice.reason

    def end(self) -> None:
        """Note an answer; may be called for every answer."""
        if self._reason is not None and not self._quiet:
            print_line(f"{self._server} answers again")
        self._reason = None


@dataclass(frozen=True, kw_only=True)
class Connection:
    """How a command reaches a server, and whether it writes results and errors as JSON."""

    server: options.Server = DEFAULT_SERVER
    as_json: options.JsonResult = False

    @cached_property
    def notice(self) -> OutageNotice:
        """The notice of outages during the command."""
        return OutageNotice(self.server, quiet=self.as_json)

    @contextmanager
    def client(self, job_id: str | None = None) -> Iterator["Rocket"]:
        """Yield a client whose errors end the command with a message and an exit code.

        Args:
            job_id: the job that the command is about.
        """
        from rocket_client.client import Rocket

        with (
            reported_failures(as_json=self.as_json),
            Rocket(self.server, patience=COMMAND_PATIENCE, on_retry=self.notice.begin) as rocket,
        ):
            try:
                yield rocket
            except ProblemError as error:
                raise _explained(rocket, error, job_id) from error

    def command(self, *arguments: str) -> str:
        """Return a command line for the user, quoted for a shell; it names the server unless that is the default."""
        return command(self.server, *arguments)


def command(server: str, *arguments: str) -> str:
    """Return a command line for the user, quoted for a shell; it names the server unless that is the default."""
    default = os.environ.get(SERVER_VARIABLE) or DEFAULT_SERVER
    return shlex.join(["rocket", *arguments, *(() if server == default else ("--server", server))])


def hub_token(variable: str | None) -> str | None:
    """Return the Hub token from an environment variable; other users could read it on a command line.

    Raises:
        typer.BadParameter: the variable is not set.
    """
    if variable is None:
        return None
    token = os.environ.get(variable)
    if not token:
        # The value is not repeated: it may be the token itself.
        raise typer.BadParameter(
            "no such environment variable; give the name of the variable, not the token", param_hint="--hub-token-env"
        )
    return token


def explain_names(
    rocket: "Rocket", error: ProblemError, *, model_id: str, datasets: Sequence[str | None]
) -> ProblemError:
    """Return a refusal of a name with the server's names and the nearest one; return any other error unchanged."""
    if error.code == "hub_unavailable":
        return _explain_outage(rocket, error, model_id)
    if error.code in {"model_not_found", "model_upload_not_found"} or error.param == "model_id":
        return _explain_name(error, model_id, rocket.models, "models")
    names = [name for name in datasets if name is not None]
    if names and (error.code == "unknown_dataset" or (error.param or "").endswith(".dataset")):
        with suppress(ClientError):
            offered = rocket.calibrations()
            # Explain first the name that the server does not have.
            names.sort(key=lambda name: name in offered)
        return _explain_name(error, names[0], rocket.calibrations, "datasets")
    return error


def _explain_outage(rocket: "Rocket", error: ProblemError, model_id: str) -> ProblemError:
    """Return the error with a suggestion, as a misspelt `local/NAME` is taken for a repository on the Hub."""
    with suppress(ClientError):
        near = _nearest(model_id, rocket.models())
        if near is not None:
            return error.explained(f"{error.detail}\n  did you mean {near}, which this server has?")
    return error


def _explain_name(error: ProblemError, name: str, offered: Callable[[], Sequence[str]], kind: str) -> ProblemError:
    try:
        names = offered()
    except ClientError:
        # The refusal itself is what matters.
        return error
    folder = Path(name).name if Path(name).exists() else None
    near = _nearest(f"local/{folder or name.removeprefix('local/')}", names) or _nearest(name, names)
    lines = [f"{name!r} is not accepted: {error.detail}"]
    if near is not None:
        lines.append(f"did you mean {near}?")
    elif folder is not None:
        lines.append(f"servers do not accept paths; copy it into the server's {kind} folder and submit local/{folder}")
    if names:
        more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        lines.append(f"this server has {', '.join(names[:_NAMES_SHOWN])}{more}")
    else:
        lines.append(f"this server has no local {kind}")
    return error.explained("\n  ".join(lines))


def _explained(rocket: "Rocket", error: ProblemError, job_id: str | None) -> ProblemError:
    if error.code == "unauthenticated":
        return error.explained(_key_advice(rocket.server))
    if error.code != "job_not_found" or job_id is None:
        return error
    near = None
    with suppress(ClientError):
        near = _nearest(job_id, [job.id for job in rocket.list_jobs(limit=_MANY).data])
    guess = f"did you mean {near}? " if near else ""
    return error.explained(
        f"{rocket.server} has no job {job_id}; {guess}`{command(rocket.server, 'jobs')}` lists those it has"
    )


def _key_advice(server: str) -> str:
    source = "its operator creates one with `rocket admin keys create`"
    if os.environ.get(KEY_VARIABLE):
        return f"{server} does not know the API key in {KEY_VARIABLE}, or it has expired or was revoked; {source}"
    return f"{server} requires an API key; set {KEY_VARIABLE} to yours ({source})"


def _nearest(name: str, names: Sequence[str]) -> str | None:
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=0.75)), None)
