"""Upper bound on how much a tokenizer's normalizer can lengthen a text, read from tokenizer.json. Loads no torch.

Replacing one character by a thousand, four times in a row, turns each character into a million million: memory runs
out before the tokenizer's output could be measured. So the bound is computed in advance.
"""

from typing import Any

from rocket_core.errors import CheckpointFormatError

# Ordinary tokenizers replace a space by three bytes, and compatibility decomposition turns one character into up to 18.
_MAX_EXPANSION = 256


def check_expansion(tokenizer: dict[str, Any], name: str) -> None:
    """Raise an error if a tokenizer's normalizer can multiply text.

    Args:
        tokenizer: content of tokenizer.json.
        name: name of the file in messages.

    Raises:
        CheckpointFormatError: a text could become many times as long.
    """
    if expansion(tokenizer.get("normalizer")) > _MAX_EXPANSION:
        raise CheckpointFormatError(
            f"{name}: the normalizer makes a text more than {_MAX_EXPANSION} times as long; correct its replacements"
        )


def expansion(normalizer: object) -> int:
    """Return an upper bound on the characters into which a normalizer's replacements can turn one character.

    Args:
        normalizer: a normalizer as described in tokenizer.json; anything else counts as 1, because the tokenizers
            library rejects it.
    """
    factor = 1
    remaining = [normalizer]
    while remaining:
        step = remaining.pop()
        if not isinstance(step, dict):
            continue
        kind = step.get("type")
        if kind == "Sequence":
            inner = step.get("normalizers")
            remaining += inner if isinstance(inner, list) else []
        elif kind == "Replace":
            factor *= max(1, _replacement(step))
        elif kind == "Prepend":
            prefix = step.get("prepend")
            # Prepended to each piece of text, which has at least one character.
            factor *= 1 + (len(prefix) if isinstance(prefix, str) else 0)
        if factor > _MAX_EXPANSION:
            break
    return factor


def _replacement(step: dict[str, Any]) -> int:
    content, pattern = step.get("content"), step.get("pattern")
    if not isinstance(content, str):
        return 1
    literal = pattern.get("String") if isinstance(pattern, dict) else None
    if isinstance(literal, str) and literal:
        return -(-len(content) // len(literal))
    # A regular expression may match the empty string, between any two characters.
    return 1 + len(content)
