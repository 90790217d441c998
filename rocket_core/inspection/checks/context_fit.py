"""What a memory leaves for the weights of a model: a fit becomes a size. Loads no torch."""

from collections.abc import Mapping
from typing import Any

from rocket_core.config import CompressionConfig
from rocket_core.engines import Engine
from rocket_core.errors import InvalidConfigError
from rocket_core.inspection.headers.model_fields import positions
from rocket_core.sizes.context_shape import context_shape
from rocket_core.sizes.engine_memory import allowance_bytes, cache_bytes
from rocket_core.sizes.memory_fit import FittedMemory
from rocket_core.sizes.reachability import size_text


def fitted(config: CompressionConfig, settings: Mapping[str, Any], itemsize: int, model: str) -> CompressionConfig:
    """Return a configuration whose target is a size where it was a memory; others unchanged.

    Args:
        config: the compression.
        settings: the content of config.json as it is in the model's folder.
        itemsize: bytes of a number of the model as it is stored.
        model: name of the model in messages.

    Raises:
        InvalidConfigError: the context is longer than the model attends to, or takes all of the memory.
        UnsupportedArchitectureError: what the model keeps of a context is not known.
    """
    asked = config.fit
    if asked is None or isinstance(asked, FittedMemory):
        return config
    longest = positions(settings)
    if longest is not None and asked.context > longest:
        raise InvalidConfigError(
            f"a context of {asked.context:,} tokens is longer than the {longest:,} that {model} attends to; lower it"
        )
    shape, engine = context_shape(settings), config.reader
    fit = FittedMemory(
        **asked.model_dump(),
        cache_bytes=cache_bytes(shape, asked, engine.runtime, itemsize),
        engine_bytes=allowance_bytes(shape, asked, engine.runtime, itemsize),
    )
    if fit.weights_bytes < 1:
        raise _is_too_small(fit, engine)
    return config.model_copy(update={"fit": fit})


def _is_too_small(fit: FittedMemory, engine: Engine) -> InvalidConfigError:
    keys, allowed = (size_text(count) for count in (fit.cache_bytes, fit.engine_bytes))
    return InvalidConfigError(
        f"{size_text(fit.memory_bytes)} leave nothing for weights: keys and values of {fit.tokens_text} take {keys}, "
        f"and {engine.title} {allowed}; lower context, batch or kv_bits, or give more memory"
    )
