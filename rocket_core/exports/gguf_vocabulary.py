"""Tokenizers out of the metadata of GGUF files, that cut text as llama.cpp does: the reverse of `gguf_tokenizer`.

`transformers` 5.23 makes tokenizers of such files too. It ignores how byte-level BPE cuts text into words, and cuts
runs of spaces in another way than SentencePiece.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rocket_core.errors import UnsupportedArchitectureError
from rocket_core.exports.gguf_tokenizer import CONTROL, PRE_TOKENIZERS, UNKNOWN, USER_DEFINED

_KINDS = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
# Other names of the same pre-tokenizers.
_SAME = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2", "llama4": "gpt-4o"}
# Pre-tokenizers of models whose texts start with a token unless the file says otherwise.
_WITH_BOS = frozenset({"llama-bpe", "tekken"})
_SPACE = "▁"


def save_tokenizer(metadata: Mapping[str, Any], folder: Path) -> None:
    """Write the tokenizer of a file as `transformers` reads it.

    Args:
        metadata: the file's metadata.
        folder: an existing folder.

    Raises:
        UnsupportedArchitectureError: it is of a kind that is not read.
        LookupError: the metadata lack a part of it.
    """
    given = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    makers = {"gpt2": _bytes, "llama": _characters}
    if given["model"] not in makers:
        raise UnsupportedArchitectureError(
            f"its tokenizer is {given['model']}, and only gpt2 and llama are read; give the original checkpoint"
        )
    tokens: list[str] = given["tokens"]
    tokenizer = makers[given["model"]](given)
    tokenizer.add_special_tokens(_added(given, CONTROL))
    tokenizer.add_tokens(_added(given, USER_DEFINED))
    named = {kind: tokens[given[f"{key}_token_id"]] for key, kind in _KINDS.items() if f"{key}_token_id" in given}
    adds_bos = given["model"] == "llama" or _pre_tokenizer(given) in _WITH_BOS
    first, last = (
        [named[f"{kind}_token"]] if given.get(f"add_{kind}_token", default) and f"{kind}_token" in named else []
        for kind, default in (("bos", adds_bos), ("eos", False))
    )
    if first or last:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in {*first, *last}],
        )
    template = {"chat_template": metadata.get("tokenizer.chat_template")}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named, **template).save_pretrained(folder)


def _added(given: Mapping[str, Any], kind: int) -> list[AddedToken]:
    """Return the tokens of a type, in their order."""
    types = given["token_type"]
    return [
        AddedToken(token if kind == CONTROL else token.replace(_SPACE, " "), normalized=False)
        for token, own in zip(given["tokens"], types, strict=True)
        if own == kind
    ]


def _pre_tokenizer(given: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of the pre-tokenizer of byte-level BPE, which cuts text into words."""
    named: str = given.get("pre", "default")
    return _SAME.get(named, named)


def _bytes(given: Mapping[str, Any]) -> Tokenizer:
    """Return byte-level BPE."""
    name = _pre_tokenizer(given)
    # The first of two pre-tokenizers with one name is llama.cpp's.
    known = {name: parts for parts, name in reversed(PRE_TOKENIZERS.items())}
    if name not in known:
        raise UnsupportedArchitectureError(
            f"its pre-tokenizer, which cuts text into words, is {name!r}; those that are read: "
            f"{', '.join(sorted(known))}. Give the original checkpoint"
        )
    cuts, ignore_merges = known[name]
    vocabulary = {token: number for number, token in enumerate(given["tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in given["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=ignore_merges))
    parts: list[Any] = [
        pre_tokenizers.Digits(individual_digits=True)
        if cut == "digits"
        else pre_tokenizers.Split(Regex(cut), "isolated")
        for cut in cuts
        if cut != "words"
    ]
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex="words" in cuts))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _characters(given: Mapping[str, Any]) -> Tokenizer:
    """Return BPE over characters with a fallback to bytes."""
    tokens: list[str] = given["tokens"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    scores = dict(zip(tokens, given["scores"], strict=True))
    unknown = next((token for token, own in zip(tokens, given["token_type"], strict=True) if own == UNKNOWN), None)
    merges = sorted(_pairs(tokens, vocabulary), key=lambda pair: -scores["".join(pair)])
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = given.get("add_space_prefix", True)
    replace = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if prefix else replace
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        + ([decoders.Strip(content=" ", left=1)] if prefix else [])
    )
    return tokenizer


def _pairs(tokens: Sequence[str], vocabulary: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of tokens that make a token, for each the pair of the lowest numbers first."""
    for token in tokens:
        if re.fullmatch(r"<.+>", token):
            continue
        pairs = [(token[:place], token[place:]) for place in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
        yield from sorted(known, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
