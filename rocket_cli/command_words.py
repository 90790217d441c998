"""Messages of the API and of typer in the words of the terminal."""

import difflib
import itertools
import re
from collections.abc import Collection, Mapping, Sequence

_COMMANDS: Mapping[str, str] = {
    "jobs": "jobs",
    "profiles": "profiles",
    "webhooks": "webhooks list",
    "models": "models",
    "calibrations": "calibrations",
}
_REQUEST = re.compile(r"GET /(\w+)((?:/[\w{}]+)*)")

_CHOICES = re.compile(r"'(.*)' is not one of (.*)\.")
# Programs that read the files of another one, by which people may ask for them.
_SAME_FILES = {"ollama": "llama.cpp", "lmstudio": "llama.cpp", "lm-studio": "llama.cpp", "gguf": "llama.cpp"}


def plain_message(message: str) -> str:
    """Return a message about an option without the words of its validator, with the value that is nearest."""
    plain = message.replace("Value error, ", "")
    found = _CHOICES.fullmatch(plain)
    if found is None:
        return plain
    choices = re.findall(r"'([^']*)'", found[2])
    asked = found[1].lower()
    near = [_SAME_FILES[asked]] if _SAME_FILES.get(asked) in choices else difflib.get_close_matches(asked, choices, n=1)
    return f"{plain} Did you mean {near[0]!r}?" if near else plain


def taken_for_a_value(arguments: Sequence[str], valued: Collection[str], known: Collection[str]) -> str | None:
    """Return what to say about an option without its value, for which the next option was taken; None if all have one.

    Args:
        arguments: the command line.
        valued: options that need a value.
        known: all options of the command.
    """
    pairs = itertools.pairwise(arguments)
    found = next(((option, value) for option, value in pairs if option in valued and value in known), None)
    return None if found is None else f"Option '{found[0]}' needs a value, and '{found[1]}' was taken for it."


def command_words(message: str) -> str:
    """Return a message with a command in place of each request that lists something; others are left as they are."""
    return _REQUEST.sub(_command, message)


def _command(request: re.Match[str]) -> str:
    noun, rest = request.groups()
    if noun == "jobs" and rest.endswith("/artifacts"):
        return "`rocket download`"
    return f"`rocket {_COMMANDS[noun]}`" if noun in _COMMANDS and not rest else request[0]
