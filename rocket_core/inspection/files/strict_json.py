"""Strict JSON parser for untrusted files: one object, with nothing that JSON readers disagree on. Loads no torch."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# More digits than any 64-bit integer or sensible constant has; converting very long integers takes quadratic time.
_MAX_DIGITS = 40
_FIELD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits on the size of a parsed JSON text.

    Attributes:
        depth: levels of objects and lists, including the outermost.
        values: total members of all objects and elements of all lists.
    """

    depth: int
    values: int


def parse_object(
    raw: bytes, *, limits: Limits | None = None, parse_float: Callable[[str], Any] = float
) -> dict[str, Any]:
    """Parse a JSON object.

    Args:
        raw: the text, UTF-8.
        limits: upper bounds on size and depth; None for callers that check each value.
        parse_float: converts numbers with a fraction or an exponent.

    Raises:
        ValueError: the text is not a JSON object, exceeds the limits, has a duplicate key, or has an integer of more
            than 40 digits. The message repeats only field names from the text.
    """
    try:
        value = json.loads(raw, object_pairs_hook=_without_duplicates, parse_int=parse_integer, parse_float=parse_float)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON at line {error.lineno}") from error
    except UnicodeDecodeError as error:
        raise ValueError("not valid UTF-8") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    if limits is not None:
        _check_limits(value, limits)
    return value


def parse_integer(text: str) -> int:
    """Convert the digits of an integer.

    Raises:
        ValueError: the integer has more than 40 digits.
    """
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"an integer of more than {_MAX_DIGITS} digits")
    return int(text)


def is_field_name(key: str) -> bool:
    """Return whether a key looks like a field name, so that a message may repeat it."""
    return _FIELD.fullmatch(key) is not None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # JSON readers disagree on which of two equal keys counts, and therefore on the content of the file.
    fields = dict(pairs)
    if len(fields) == len(pairs):
        return fields
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise ValueError(f"{key if is_field_name(key) else 'a key'} occurs twice")
        seen.add(key)
    raise AssertionError("unreachable: fewer keys than pairs")


def _check_limits(value: dict[str, Any], limits: Limits) -> None:
    # Level by level, because the input may be nested deeper than the recursion limit.
    level: list[Any] = [value]
    count = 0
    for _ in range(limits.depth):
        inner: list[Any] = []
        for container in level:
            count += len(container)
            if count > limits.values:
                raise ValueError(f"more than {limits.values} values")
            items = container.values() if isinstance(container, dict) else container
            inner += [item for item in items if isinstance(item, dict | list)]
        if not inner:
            return
        level = inner
    raise ValueError(f"more than {limits.depth} levels of objects and lists")
