"""Shell completion with names that the server knows, if it answers quickly; otherwise no completion."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING

import typer

from rocket_cli.job_target import target_text
from rocket_client.errors import ClientError

if TYPE_CHECKING:
    from rocket_client.client import Rocket
    from rocket_client.models import Job

# Short, as the user is waiting.
_SECONDS = 1.5
_MANY = 100
_STATUSES = ("queued", "running", "cancelling", "succeeded", "failed", "cancelled")


# A name, or a name and its description.
Offer = str | tuple[str, str]


def _from_server(ask: Callable[["Rocket"], Iterable[Offer]]) -> Callable[[typer.Context, str], list[Offer]]:
    """Return a completion with the names from the command line's server that start with what was typed.

    It offers nothing after a timeout.
    """

    def offered(context: typer.Context, incomplete: str) -> list[Offer]:
        server = context.params.get("server")
        offers: list[Offer] = []

        def run() -> None:
            from rocket_client.client import Rocket

            # Errors must not be printed while the user is typing a line.
            with suppress(ClientError), Rocket(server, patience=0) as rocket:
                offers.extend(ask(rocket))

        # An abandoned daemon thread: name resolution and unresponsive hosts would exceed the timeout.
        thread = Thread(target=run, daemon=True)
        thread.start()
        thread.join(_SECONDS)
        if thread.is_alive():
            return []
        return [offer for offer in offers if (offer if isinstance(offer, str) else offer[0]).startswith(incomplete)]

    return offered


@_from_server
def job_ids(rocket: "Rocket") -> Iterable[Offer]:
    """Return jobs, newest first, with descriptions."""
    return [(job.id, _description(job)) for job in rocket.list_jobs(limit=_MANY).data]


@_from_server
def jobs_and_profiles(rocket: "Rocket") -> Iterable[Offer]:
    """Return jobs that have a profile, and profiles."""
    jobs = [job for job in rocket.list_jobs(limit=_MANY).data if job.profile_id is not None]
    return [
        *((job.id, _description(job)) for job in jobs),
        *((profile.id, f"profile of {profile.model_id}") for profile in rocket.list_profiles(limit=_MANY).data),
    ]


@_from_server
def model_ids(rocket: "Rocket") -> Iterable[Offer]:
    """Return the models in the server's folder."""
    return rocket.models()


@_from_server
def calibration_names(rocket: "Rocket") -> Iterable[Offer]:
    """Return the calibration data that the server offers, including uploads."""
    return rocket.calibrations()


def statuses(incomplete: str) -> list[str]:
    """Return the statuses of jobs, without a request to the server."""
    return [status for status in _STATUSES if status.startswith(incomplete)]


def _description(job: "Job") -> str:
    return f"{job.status} {job.model_id} {target_text(job)}"
