"""Tokenizers for llama.cpp: the metadata that makes it split text into the same tokens. Loads no torch.

llama.cpp has its own tokenizers. Two kinds can be expressed: byte-level BPE, whose way of cutting text into words must
be one that llama.cpp knows by name, and BPE over characters with a fallback to bytes, as SentencePiece has it.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rocket_core.errors import UnsupportedExportError
from rocket_core.exports.gguf_file import GgufValue
from rocket_core.inspection.files.model_files import read_file
from rocket_core.inspection.files.strict_json import parse_object

_TOKENIZER, _SETTINGS, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_MAX_BYTES = 2**29
_SPACE = "▁"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")

# llama.cpp's numbers for types of tokens.
_NORMAL, UNKNOWN, CONTROL, USER_DEFINED, _UNUSED, _BYTE_TOKEN = 1, 2, 3, 4, 5, 6
# Score of tokens that no merge makes, below those of all that one does.
_NEVER = -1e9

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_WITH_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START = r"[^\r\n\p{L}\p{N}]?"
_LLAMA3 = rf"{_CONTRACTIONS}|{_START}\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_START}\p{{L}}+|\p{{N}}|{_REST}"
_TEKKEN = rf"{_START}{_UPPER}*{_LOWER}+|{_START}{_UPPER}+{_LOWER}*|\p{{N}}|{_REST_WITH_SLASH}"
_GPT4O = (
    rf"{_START}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_START}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_REST_WITH_SLASH}"
)
# llama.cpp's name of each way of cutting text into words, and whether tokens are looked up before merges.
PRE_TOKENIZERS: dict[tuple[tuple[str, ...], bool], str] = {
    (("words",), False): "gpt-2",
    (("digits", "words"), False): "smollm",
    ((_LLAMA3,), True): "llama-bpe",
    ((_LLAMA3,), False): "smaug-bpe",
    ((_QWEN2,), False): "qwen2",
    ((_TEKKEN,), True): "tekken",
    ((_TEKKEN,), False): "tekken",
    ((_GPT4O,), False): "gpt-4o",
}


def tokenizer_metadata(folder: Path, config: Mapping[str, Any], vocabulary: int) -> dict[str, GgufValue]:
    """Return the metadata of a model's tokenizer.

    Args:
        folder: folder with `tokenizer.json`, `tokenizer_config.json` and perhaps `chat_template.jinja`.
        config: the model's settings, for special tokens that the tokenizer does not name.
        vocabulary: rows of the token embedding.

    Raises:
        UnsupportedExportError: llama.cpp has no such tokenizer.
    """
    if not (folder / _TOKENIZER).is_file():
        raise _refusal(f"there is no {_TOKENIZER}; save the model's fast tokenizer into the folder")
    tokenizer = _read(folder, _TOKENIZER)
    settings = _read(folder, _SETTINGS) if (folder / _SETTINGS).is_file() else {}
    model = tokenizer["model"]
    if model.get("type", "BPE") != "BPE":
        raise _refusal(f"its model is {model.get('type')}, and only BPE can be written")
    made = _characters(tokenizer) if model.get("byte_fallback") else _bytes(tokenizer)
    tokens, types = _vocabulary(tokenizer, vocabulary)
    metadata = {
        "tokenizer.ggml.model": GgufValue("string", "llama" if model.get("byte_fallback") else "gpt2"),
        **made,
        "tokenizer.ggml.tokens": GgufValue("string", tokens),
        "tokenizer.ggml.token_type": GgufValue("int32", types),
    }
    if model.get("byte_fallback"):
        metadata["tokenizer.ggml.scores"] = GgufValue("float32", _scores(tokenizer, tokens))
    else:
        metadata["tokenizer.ggml.merges"] = GgufValue("string", [" ".join(pair) for pair in _merges(model)])
    metadata |= _special(tokenizer, settings, config, vocabulary)
    template = _template(folder, settings)
    return metadata if template is None else metadata | {"tokenizer.chat_template": GgufValue("string", template)}


def _refusal(reason: str) -> UnsupportedExportError:
    return UnsupportedExportError(f"The tokenizer cannot be written for llama.cpp: {reason}")


def _read(folder: Path, name: str) -> dict[str, Any]:
    return parse_object(read_file(folder, name, limit=_MAX_BYTES))


def _flat(part: Mapping[str, Any] | None, inner: str) -> Iterator[Mapping[str, Any]]:
    """Yield a part of a tokenizer, or those of a sequence of parts."""
    if part is None:
        return
    if part["type"] == "Sequence":
        for one in part[inner]:
            yield from _flat(one, inner)
    else:
        yield part


def _bytes(tokenizer: Mapping[str, Any]) -> dict[str, GgufValue]:
    """Return what is special to byte-level BPE."""
    normalizers = [part["type"] for part in _flat(tokenizer.get("normalizer"), "normalizers")]
    if set(normalizers) - {"NFC"}:
        raise _refusal(f"it normalizes text by {', '.join(normalizers)}")
    cuts: list[str] = []
    byte_level = False
    for part in _flat(tokenizer.get("pre_tokenizer"), "pretokenizers"):
        match part["type"]:
            case "ByteLevel" if not part.get("add_prefix_space"):
                byte_level = True
                cuts += ["words"] if part.get("use_regex", True) else []
            case "Split" if part.get("behavior") == "Isolated" and not part.get("invert"):
                cuts.append(str(part["pattern"].get("Regex")))
            case "Digits" if part.get("individual_digits"):
                cuts.append("digits")
            case other:
                raise _refusal(f"it cuts text into words by {other}")
    name = PRE_TOKENIZERS.get((tuple(cuts), bool(tokenizer["model"].get("ignore_merges"))))
    if not byte_level or name is None:
        raise _refusal(f"it cuts text into words by {' and '.join(cuts) or 'nothing'}, which has no name in llama.cpp")
    return {"tokenizer.ggml.pre": GgufValue("string", name)}


def _characters(tokenizer: Mapping[str, Any]) -> dict[str, GgufValue]:
    """Return what is special to BPE over characters."""
    prefix = False
    for part in _flat(tokenizer.get("normalizer"), "normalizers"):
        match part:
            case {"type": "Prepend", "prepend": "▁"}:
                prefix = True
            case {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
                pass
            case _:
                raise _refusal(f"it normalizes text by {part['type']}")
    for part in _flat(tokenizer.get("pre_tokenizer"), "pretokenizers"):
        match part:
            case {"type": "Metaspace", "replacement": "▁"} if not part.get("split"):
                prefix = prefix or part.get("prepend_scheme", "always") != "never"
            case {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious"}:
                pass  # spaces were replaced before
            case _:
                raise _refusal(f"it cuts text into words by {part['type']}")
    return {
        "tokenizer.ggml.pre": GgufValue("string", "default"),
        "tokenizer.ggml.add_space_prefix": GgufValue("bool", prefix),
    }


def _merges(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the pairs of tokens that are merged, the first ones first."""
    pairs = []
    for merge in model["merges"]:
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        if " " in left + right:
            raise _refusal("a merge contains a space")
        pairs.append((left, right))
    return pairs


def _scores(tokenizer: Mapping[str, Any], tokens: list[str]) -> list[float]:
    """Return a score for each token: llama.cpp merges the pair whose token has the highest."""
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(_merges(tokenizer["model"])):
        ranks.setdefault(left + right, rank)
    return [-float(ranks[token]) if token in ranks else _NEVER if len(token) > 1 else 0.0 for token in tokens]


def _vocabulary(tokenizer: Mapping[str, Any], vocabulary: int) -> tuple[list[str], list[int]]:
    """Return text and type of each token."""
    model, added = tokenizer["model"], tokenizer.get("added_tokens") or []
    tokens = [f"[PAD{number}]" for number in range(vocabulary)]
    types = [_UNUSED] * vocabulary
    beyond = [token for token, number in model["vocab"].items() if number >= vocabulary]
    if beyond:
        raise _refusal(f"it has {len(beyond)} tokens more than the model has rows in its token embedding")
    for token, number in model["vocab"].items():
        tokens[number] = token
        is_byte = model.get("byte_fallback") and _BYTE.fullmatch(token)
        types[number] = UNKNOWN if token == model.get("unk_token") else _BYTE_TOKEN if is_byte else _NORMAL
    for token in added:
        number = token["id"]
        if number < vocabulary and types[number] != UNKNOWN:
            special = token.get("special")
            # Spaces are not replaced in tokens that are found before text is normalized.
            tokens[number] = token["content"] if special else token["content"].replace(_SPACE, " ")
            types[number] = CONTROL if special else USER_DEFINED
    return tokens, types


def _special(
    tokenizer: Mapping[str, Any], settings: Mapping[str, Any], config: Mapping[str, Any], vocabulary: int
) -> dict[str, GgufValue]:
    """Return special tokens, and whether text starts and ends with one."""
    ids = dict(tokenizer["model"]["vocab"]) | {
        token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []
    }
    metadata: dict[str, GgufValue] = {}
    numbers: dict[str, int] = {}
    for key, kind in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        named = settings.get(f"{kind}_token")
        number = ids.get(named["content"] if isinstance(named, Mapping) else named)
        if number is None:
            number = config.get(f"{kind}_token_id")
        if isinstance(number, list):
            number = number[0] if number else None
        if number is not None and 0 <= number < vocabulary:
            numbers[kind] = number
            metadata[f"tokenizer.ggml.{key}_token_id"] = GgufValue("uint32", number)
    first, last = _ends(tokenizer, ids)
    for kind, number in (("bos", first), ("eos", last)):
        if number is not None and number != numbers.get(kind):
            raise _refusal(f"it adds token {number} to texts, which is not its {kind} token")
        metadata[f"tokenizer.ggml.add_{kind}_token"] = GgufValue("bool", number is not None)
    return metadata


def _ends(tokenizer: Mapping[str, Any], ids: Mapping[str, int]) -> tuple[int | None, int | None]:
    """Return the tokens that are added before and after a text."""
    first = last = None
    for part in _flat(tokenizer.get("post_processor"), "processors"):
        match part["type"]:
            case "TemplateProcessing":
                items = [item.get("SpecialToken", {}).get("id") for item in part["single"]]
                text = items.index(None)
                before, after = items[:text], items[text + 1 :]
                if len(before) > 1 or len(after) > 1:
                    raise _refusal("it adds more than one token to texts")
                first, last = (ids[token[0]] if token else None for token in (before, after))
            case "ByteLevel":
                pass  # concerns offsets only
            case other:
                raise _refusal(f"it adds tokens to texts by {other}")
    return first, last


def _template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the chat template."""
    if (folder / _TEMPLATE).is_file():
        return read_file(folder, _TEMPLATE).decode()
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None
