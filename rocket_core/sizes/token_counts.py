"""Numbers of tokens as people write them, such as 500k or 2M."""

from collections.abc import Mapping
from decimal import Decimal, InvalidOperation

_FACTORS = {"k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9}
# As models are named by their context: 32k is 32,768.
_CONTEXT_FACTORS = {"k": 2**10, "K": 2**10, "M": 2**20}


def parse_tokens(text: str) -> int:
    """Return a number of tokens, at least 1.

    Raises:
        ValueError: the text is not such a number.
    """
    count = _parsed(text, _FACTORS)
    if count is None:
        raise ValueError(f"{text!r} is not a number of tokens; use for example 500k, 2M or 1500000")
    return count


def parse_context(text: str) -> int:
    """Return the tokens of a context, at least 1; k and M are powers of 1024.

    Raises:
        ValueError: the text is not such a number.
    """
    count = _parsed(text, _CONTEXT_FACTORS)
    if count is None:
        raise ValueError(f"{text!r} is not a number of tokens; use for example 32k or 32768")
    return count


def _parsed(text: str, factors: Mapping[str, int]) -> int | None:
    digits, factor = (text[:-1], factors[text[-1]]) if text[-1:] in factors else (text, 1)
    try:
        count = Decimal(digits) * factor
    except InvalidOperation:
        count = Decimal(0)
    return int(count) if count.is_finite() and count >= 1 and count == count.to_integral_value() else None
