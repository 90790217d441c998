"""Loading of settings from the environment, and their description."""

import difflib
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import SecretStr, ValidationError

from app.shared.errors import InvalidSettingsError
from app.shared.settings.model import PREFIX, Settings, variable_of

# Variables of the client and of the tests, not of the service.
_FOREIGN_VARIABLES = frozenset({"ROCKET_SERVER", "ROCKET_API_KEY"})
_FOREIGN_PREFIXES = ("ROCKET_TEST_", "ROCKET_REQUIRE_")
# Settings by their old variables, which are accepted for one more release.
_RENAMED = {
    "ROCKET_JOB_ISOLATION": "isolation",
    "ROCKET_KEPT_PROFILES_BYTES": "profile_cache_bytes",
    "ROCKET_RING_SECONDS": "notify_seconds",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingRow:
    """One line of the settings reference.

    Attributes:
        variable: the environment variable.
        default: its default as one would type it; empty if it has none.
        meaning: its description.
    """

    variable: str
    default: str
    meaning: str


def load_settings(**overrides: Any) -> Settings:
    """Load the settings, and refuse variables that look like settings but are not.

    Args:
        overrides: settings by name that take precedence over the environment, e.g. command line options.

    Raises:
        InvalidSettingsError: names every invalid variable, but no values, as these may be secret.
    """
    known = {row.variable for row in describe()}
    problems = [_unknown(variable, known) for variable in sorted(os.environ) if _is_stray(variable, known)]
    problems += [_contradiction(old, new) for old, new in deprecated_variables() if _differ(old, new)]
    renamed = {_RENAMED[old]: os.environ[old] for old, _ in deprecated_variables()}
    try:
        settings = Settings(**(renamed | overrides))
    except ValidationError as error:
        problems += [_problem(problem["loc"], problem["msg"]) for problem in error.errors(include_input=False)]
        raise InvalidSettingsError("invalid settings: " + "; ".join(problems)) from None
    if problems:
        raise InvalidSettingsError("invalid settings: " + "; ".join(problems))
    return settings


def deprecated_variables() -> Iterator[tuple[str, str]]:
    """Yield the old variables that are set, each with its new name."""
    for old, name in _RENAMED.items():
        if os.environ.get(old):
            yield old, variable_of(name)


def describe() -> tuple[SettingRow, ...]:
    """Return the table of all settings, in the order of the class."""
    return tuple(
        SettingRow(
            variable=variable_of(name),
            default=_default_text(field.default),
            meaning=" ".join((field.description or "").split()),
        )
        for name, field in Settings.model_fields.items()
    )


def _default_text(default: object) -> str:
    if default is None:
        return ""
    if isinstance(default, SecretStr):
        return default.get_secret_value()
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, float) else str(default)


def _is_stray(variable: str, known: Collection[str]) -> bool:
    return (
        variable.startswith(PREFIX)
        and variable not in known
        and variable not in _FOREIGN_VARIABLES
        and variable not in _RENAMED
        and not variable.startswith(_FOREIGN_PREFIXES)
    )


def _differ(old: str, new: str) -> bool:
    return os.environ.get(new, "") not in {"", os.environ[old]}


def _contradiction(old: str, new: str) -> str:
    return f"{new} and its old name {old} have different values; unset {old}"


def _unknown(variable: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(variable, known, n=1)
    return f"{variable} is not a setting" + (f"; did you mean {near[0]}?" if near else "")


def _problem(location: tuple[int | str, ...], message: str) -> str:
    name = str(location[0]) if location else "settings"
    variable = variable_of(name) if name in Settings.model_fields else name
    return f"{variable}: {message.removeprefix('Value error, ')}"
