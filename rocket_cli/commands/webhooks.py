"""`rocket webhooks`: addresses that a server reports the ends of your jobs to."""

import json
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from rocket_cli import options
from rocket_cli.connection import Connection
from rocket_cli.option_groups import CommandGroup
from rocket_cli.progress_view import print_line
from rocket_client.models import Delivery
from rocket_core.errors import ExitCode

if TYPE_CHECKING:
    from rocket_client.client import Rocket

app = CommandGroup(help="Get notified when your jobs end.", no_args_is_help=True)

# A delivery may take 10 seconds, after another one of the tenant that takes as long.
_TEST_SECONDS = 60.0
_LOOK_SECONDS = 0.3


class Event(StrEnum):
    """What is reported."""

    SUCCEEDED = "job.succeeded"
    FAILED = "job.failed"
    CANCELLED = "job.cancelled"


_Id = Annotated[str, options.argument("WEBHOOK", "Id of a webhook, as listed by `rocket webhooks list`.")]
_Url = Annotated[str, options.argument("URL", "Where deliveries are sent, such as https://example.org/x.")]
_Events = Annotated[
    list[Event] | None,
    options.option("EVENT", "Report only job.succeeded, job.failed, job.cancelled; repeatable.", name="--event"),
]


@app.command("list")
def list_webhooks(*, connection: Connection) -> None:
    """List your webhooks, oldest first."""
    with connection.client() as rocket:
        found = rocket.list_webhooks()
    if connection.as_json:
        typer.echo(json.dumps({"data": [hook.model_dump(mode="json") for hook in found]}, indent=2))
        return
    for hook in found:
        typer.echo(f"{hook.id}  {hook.url}  {', '.join(hook.events)}")
    if not found:
        print_line(f"no webhooks; `{connection.command('webhooks', 'create', 'URL')}` creates one")


@app.command("create")
def create_webhook(*, url: _Url, events: _Events = None, connection: Connection) -> None:
    """Create a webhook, and print its id and the secret that deliveries are signed with; it is shown only now."""
    with connection.client() as rocket:
        made = rocket.create_webhook(url, events=[event.value for event in events] if events else None)
    if connection.as_json:
        typer.echo(made.model_dump_json(indent=2))
        return
    typer.echo(f"{made.id}  {made.secret}")
    print_line(f"keep the secret, it is not shown again; `{connection.command('webhooks', 'test', made.id)}` tries it")


@app.command("delete")
def delete_webhook(*, webhook_id: _Id, connection: Connection) -> None:
    """Delete a webhook and its pending deliveries."""
    with connection.client() as rocket:
        rocket.delete_webhook(webhook_id)


@app.command("test")
def send_test(*, webhook_id: _Id, connection: Connection) -> None:
    """Send a test delivery to a webhook once, and print the outcome; exit code 75 if it did not arrive."""
    with connection.client() as rocket:
        delivery = _attempted(rocket, webhook_id, rocket.test_webhook(webhook_id))
    if connection.as_json:
        typer.echo(delivery.model_dump_json(indent=2))
    elif delivery.delivered_at is not None:
        typer.echo(f"{delivery.id} was accepted by the receiver")
    elif delivery.next_attempt_at is not None:
        print_line(f"{delivery.id} was not sent yet: no worker is running, or all are busy sending")
    else:
        print_line(f"{delivery.id} was not delivered: {delivery.error}")
    if delivery.delivered_at is None:
        raise typer.Exit(ExitCode.TEMPORARY)


def _attempted(rocket: "Rocket", webhook_id: str, delivery: Delivery) -> Delivery:
    """Return a delivery once it was attempted, or as it is after a while."""
    deadline = time.monotonic() + _TEST_SECONDS
    while delivery.next_attempt_at is not None and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        newest = {each.id: each for each in rocket.get_webhook(webhook_id).deliveries}
        delivery = newest.get(delivery.id, delivery)
    return delivery
