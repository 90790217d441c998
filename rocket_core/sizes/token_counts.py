"""Numbers of tokens as people write them, such as 500k or 2M."""

from decimal import Decimal, InvalidOperation

_FACTORS = {"k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9}


def parse_tokens(text: str) -> int:
    """Return a number of tokens, at least 1.

    Raises:
        ValueError: the text is not such a number.
    """
    digits, factor = (text[:-1], _FACTORS[text[-1]]) if text[-1:] in _FACTORS else (text, 1)
    try:
        count = Decimal(digits) * factor
    except InvalidOperation:
        count = Decimal(0)
    if not count.is_finite() or count < 1 or count != count.to_integral_value():
        raise ValueError(f"{text!r} is not a number of tokens; use for example 500k, 2M or 1500000")
    return int(count)
