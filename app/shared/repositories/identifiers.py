"""Ids of rows: they increase with the time of creation, and cannot be guessed."""

import secrets
from datetime import datetime

# Crockford's base 32: no letters that look like digits, and in sorted order.
_DIGITS = "0123456789abcdefghjkmnpqrstvwxyz"
_RANDOM_BITS = 80
_ID_DIGITS = 26


def new_id(prefix: str, at: datetime) -> str:
    """Return a new id such as `job_01m4...`: milliseconds, then 80 random bits.

    Args:
        prefix: identifies the table.
        at: time of creation.
    """
    number = (int(at.timestamp() * 1000) << _RANDOM_BITS) | secrets.randbits(_RANDOM_BITS)
    digits = [_DIGITS[number >> 5 * position & 31] for position in reversed(range(_ID_DIGITS))]
    return f"{prefix}_" + "".join(digits)
