"""Messages of the API in the words of the terminal: where the API names a request, a command is named."""

import re
from collections.abc import Mapping

_COMMANDS: Mapping[str, str] = {
    "jobs": "jobs",
    "profiles": "profiles",
    "webhooks": "webhooks list",
    "models": "models",
    "calibrations": "calibrations",
}
_REQUEST = re.compile(r"GET /(\w+)((?:/[\w{}]+)*)")


def command_words(message: str) -> str:
    """Return a message with a command in place of each request that lists something; others are left as they are."""
    return _REQUEST.sub(_command, message)


def _command(request: re.Match[str]) -> str:
    noun, rest = request.groups()
    if noun == "jobs" and rest.endswith("/artifacts"):
        return "`rocket download`"
    return f"`rocket {_COMMANDS[noun]}`" if noun in _COMMANDS and not rest else request[0]
