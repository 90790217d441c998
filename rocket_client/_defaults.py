"""Where the server is and how long it may be silent, unless somebody says otherwise."""

import os

DEFAULT_SERVER = "http://127.0.0.1:8000"
SERVER_VARIABLE = "ROCKET_SERVER"
KEY_VARIABLE = "ROCKET_API_KEY"

# Seconds without an answer after which a request fails.
PATIENCE = 30.0
# The same while a job is followed or a file is fetched: the server may be starting again.
LASTING_PATIENCE = 300.0
# The same for somebody who sits at a terminal and has perhaps not started any server.
COMMAND_PATIENCE = 10.0


def address_and_key(server: str | None, api_key: str | None) -> tuple[str, str | None]:
    """Address and key as given, or else as the environment has them."""
    address = server or os.environ.get(SERVER_VARIABLE) or DEFAULT_SERVER
    return address, (api_key or os.environ.get(KEY_VARIABLE) or "").strip() or None


def ignore(told: object) -> None:
    """Hear what is told, and does nothing: the default where somebody may be told something."""
