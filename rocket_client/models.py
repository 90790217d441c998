"""`rocket models`: which models a server has of its own."""

from rocket_client import options
from rocket_client.defaults import DEFAULT_SERVER
from rocket_client.remote import connected
from rocket_client.rendering import print_names

NAME = "models"


def models(*, server: options.Server = DEFAULT_SERVER, as_json: options.JsonResult = False) -> None:
    """List the models in the server's folder, as `rocket submit` takes them; those of the Hub need no list."""
    with connected(server, as_json=as_json) as rocket:
        found = rocket.models()
    print_names(found, "models", as_json=as_json)
