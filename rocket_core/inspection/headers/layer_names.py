"""Names of layers, in the files of a checkpoint and in the built model. Loads no torch."""

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

# Families whose layers have the same names in files and models, except for a prefix that either may lack. All others
# are left out: transformers may give their layers names that cannot be derived from the files.
_FAMILIES_BY_PREFIX = {
    "bert": "bert",
    "biogpt": "biogpt",
    "deberta": "deberta deberta-v2",
    "distilbert": "distilbert",
    "electra": "electra",
    "gpt_neox": "gpt_neox",
    "model": """
        arcee bart cohere cohere2 ernie4_5 exaone4 gemma gemma2 gemma3_text glm glm4 granite helium llama mbart mistral
        modernbert olmo olmo2 olmo3 opt persimmon phi phi3 qwen2 qwen3 seed_oss smollm3 stablelm starcoder2 whisper xglm
    """,
    "mpnet": "mpnet",
    "roberta": "camembert roberta xlm-roberta",
    "transformer": "bloom codegen gpt2 gpt_bigcode gpt_neo gptj mpt mt5 t5 umt5",
}
PREFIXES: Mapping[str, str] = MappingProxyType(
    {family: prefix for prefix, families in _FAMILIES_BY_PREFIX.items() for family in families.split()}
)
"""By model type, the prefix of layer names, in files or in models."""

# Names of token embeddings and heads in these families, after the prefix that either may lack.
_TABLES = (
    *("embed_tokens", "decoder.embed_tokens", "encoder.embed_tokens", "shared", "wte", "embed_in", "word_embeddings"),
    *("embeddings.word_embeddings", "embeddings.tok_embeddings", "lm_head", "lm_head.decoder", "decoder", "embed_out"),
    *("proj_out", "output_projection", "cls.predictions.decoder", "vocab_projector", "generator_lm_head"),
)

_LEAVES_SHOWN = 12
_MAX_LEAF_CHARACTERS = 64
_MAX_LEAVES_COMPARED = 256
_MAX_PATTERN_COMPARED = 256
# Characters of names times characters of patterns.
_MOST_COMPARED = 250_000_000


def family_of(config: Mapping[str, object]) -> str:
    """Return the model type of a config.json; empty if it has none."""
    family = config.get("model_type")
    return family if isinstance(family, str) else ""


def possible_names(config: Mapping[str, object], stored: str) -> tuple[str, ...]:
    """Return the names that a layer may have in the built model.

    Args:
        config: the content of config.json.
        stored: the layer's name in the files.
    """
    prefix = PREFIXES.get(family_of(config))
    if prefix is None:
        # Some checkpoints omit the name of the module around the decoder.
        return stored, f"model.{stored}", f"transformer.{stored}"
    bare = stored.removeprefix(f"{prefix}.")
    return f"{prefix}.{bare}", bare


def possible_table_names(config: Mapping[str, object]) -> tuple[str, ...]:
    """Return the names by which patterns may match a token embedding or a head: more than a model has."""
    full = {name for table in _TABLES for name in possible_names(config, table)}
    return tuple(sorted(full | {last_part(name) for name in full}))


def last_part(name: str) -> str:
    """Return the part of a module's name after its last dot, by which a token embedding or a head is known."""
    return name.rpartition(".")[2]


def name_matcher(patterns: Iterable[str]) -> Callable[[Iterable[str]], bool]:
    """Return a function that checks whether any of a layer's names matches any of the glob patterns.

    All patterns are combined into one regular expression, which does not backtrack from one star into another.
    """
    expressions = [fnmatch.translate(pattern) for pattern in patterns]
    if not expressions:
        return lambda _names: False
    match = re.compile("|".join(expressions)).match
    return lambda names: any(match(name) is not None for name in names)


def is_costly(names: Iterable[str], patterns: Iterable[str]) -> bool:
    """Return whether matching patterns against names takes more work than a request may cause.

    Comparing a pattern with a name takes at most the product of their lengths.
    """
    return sum(map(len, names)) * sum(map(len, patterns)) > _MOST_COMPARED


def advice_on_pattern(names: Sequence[str], pattern: str) -> str:
    """Return a suggestion to replace a pattern that matches none of the names; at least one name is required."""
    leaves = sorted({leaf for name in names if len(leaf := name.rsplit(".", 1)[-1]) <= _MAX_LEAF_CHARACTERS})
    # The comparison takes time quadratic in the number of characters, once for each leaf.
    if len(leaves) <= _MAX_LEAVES_COMPARED and len(pattern) <= _MAX_PATTERN_COMPARED:
        close = difflib.get_close_matches(pattern.strip("*."), leaves, n=1)
        if close:
            return f"did you mean '*.{close[0]}'?"
    if not leaves:
        return "list the names of layers with a safetensors viewer"
    more = ", ..." if len(leaves) > _LEAVES_SHOWN else ""
    return (
        f"layers are called like {names[0]!r} and end in {', '.join(leaves[:_LEAVES_SHOWN])}{more}; "
        f"'*.{leaves[0]}' is a pattern for all that end alike"
    )
