"""Default server address and timeouts."""

import os

DEFAULT_SERVER = "http://127.0.0.1:8000"
SERVER_VARIABLE = "ROCKET_SERVER"
KEY_VARIABLE = "ROCKET_API_KEY"

# Seconds without an answer after which a request fails.
PATIENCE = 30.0
# The same while a job is followed or a file is downloaded: the server may be restarting.
LASTING_PATIENCE = 300.0
# The same for a user at a terminal, who may not have started a server.
COMMAND_PATIENCE = 10.0


def address_and_key(server: str | None, api_key: str | None) -> tuple[str, str | None]:
    """Return the address and key as given, or else from the environment; an empty key means no key."""
    address = server or os.environ.get(SERVER_VARIABLE) or DEFAULT_SERVER
    key = os.environ.get(KEY_VARIABLE, "") if api_key is None else api_key
    return address, key.strip() or None


def noop(event: object) -> None:
    """Do nothing: the default callback."""
