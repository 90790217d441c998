"""How much longer a tokenizer's normalizer can make a text, read from tokenizer.json. Loads no torch.

A replacement of one character by a thousand, four times in a row, makes a million million of each character: the
memory is gone before anything that the tokenizer returns could be counted. So the bound is computed beforehand.
"""

from typing import Any

from rocket_core.errors import CheckpointFormatError

# Ordinary tokenizers replace a space by three bytes, and compatibility decomposition makes up to 18 characters of one.
_MAX_EXPANSION = 256


def refuse_expansion(tokenizer: dict[str, Any], name: str) -> None:
    """Refuse a tokenizer whose normalizer or pre-tokenizer can multiply text.

    Args:
        tokenizer: content of tokenizer.json.
        name: names the file in messages.

    Raises:
        CheckpointFormatError: a text could become many times as long.
    """
    if expansion(tokenizer.get("normalizer")) > _MAX_EXPANSION:
        raise CheckpointFormatError(
            f"{name}: the normalizer makes a text more than {_MAX_EXPANSION} times as long; correct its replacements"
        )


def expansion(normalizer: object) -> int:
    """Upper bound on the characters that the replacements of a normalizer make of one character.

    Args:
        normalizer: a normalizer as tokenizer.json describes it; what cannot be one counts as 1, as the tokenizers
            library refuses it.
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
            # In front of each piece of text, which has at least one character.
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
    # A regular expression may match nothing at all, between any two characters.
    return 1 + len(content)
