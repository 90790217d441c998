"""Bytes that an engine takes for a context, in addition to the weights.

Each is what the engine's source computes, or an upper bound that was measured; docs/how-to/engines.md says which.

References:
    llama.cpp, `src/llama-kv-cache-iswa.cpp` (cells of a window) and `tools/fit-params` (the margin).
    vLLM, `vllm/v1/kv_cache_interface.py` (`max_memory_usage_bytes`), `vllm/config/cache.py` (the fraction) and
        `vllm/engine/arg_utils.py` (`get_batch_defaults`).
    transformers, `cache_utils.py` (`DynamicCache`).
"""

from fractions import Fraction

from rocket_core.errors import InvalidConfigError
from rocket_core.sizes.context_shape import ContextShape
from rocket_core.sizes.memory_fit import MemoryFit

# Bytes of a number in the cache, scales included.
_LLAMA_CPP_ITEMS = {16: Fraction(2), 8: Fraction(34, 32), 4: Fraction(18, 32)}
_ROW_BLOCK = 32
# llama.cpp drops the window of other families (Mistral, Phi-3).
_LLAMA_CPP_WINDOWS = frozenset({"gemma2", "gemma3_text", "gpt_oss"})
_CELLS = 256
# Tokens of a prompt that llama.cpp computes at once; `prefill_chunk_size` of transformers is to be the same.
_CHUNK = 512
_VLLM_BLOCK = 16
# Tokens that `vllm serve` computes at once, and sequences that it samples for, also on large devices.
_VLLM_STEP, _VLLM_LARGE_STEP, _LARGE = (2048, 256), (8192, 1024), 70 * 2**30
_FLOAT32 = 4
_MARGIN, _MARGIN_PART = 2**30, 20


def cache_bytes(shape: ContextShape, fit: MemoryFit, engine: str, itemsize: int) -> int:
    """Return the bytes of keys and values, latents and states that an engine keeps of a context.

    Args:
        shape: what the layers keep.
        fit: the context.
        engine: `runtime` of the engine: rocket (transformers), vllm or llama.cpp.
        itemsize: bytes of a number of the model as it is stored.

    Raises:
        InvalidConfigError: the engine does not have such keys and values, or what it takes is not known.
    """
    match engine:
        case "llama.cpp":
            return _llama_cpp_cache(shape, fit)
        case "vllm":
            return _vllm_cache(shape, fit)
        case "rocket":
            return _transformers_cache(shape, fit, itemsize)
        case _:
            raise InvalidConfigError(
                f"what engine {engine} takes in addition to the weights was not measured; give target_bytes, not fit"
            )


def allowance_bytes(shape: ContextShape, fit: MemoryFit, engine: str, itemsize: int) -> int:
    """Return the bytes that an engine is allowed for what it computes, and for its runtime.

    Args:
        shape: what the layers keep and compute.
        fit: the memory and the context.
        engine: as for `cache_bytes`, which refuses others.
        itemsize: bytes of a number of the model as it is stored.
    """
    # What a token takes within a block.
    numbers = 3 * shape.inner + (4 + shape.experts) * shape.width
    margin = min(_MARGIN, fit.memory_bytes // _MARGIN_PART)
    match engine:
        case "llama.cpp":
            masks = 2 * sum(_llama_cpp_cells(shape, fit))
            logits = fit.batch * shape.vocabulary * _FLOAT32
            return _llama_cpp_chunk(fit) * (_FLOAT32 * numbers + masks) + logits + margin
        case "vllm":
            tokens, sequences = _vllm_step(fit)
            unused = fit.memory_bytes * 8 // 100
            return tokens * 2 * numbers + 3 * sequences * shape.vocabulary * _FLOAT32 + unused
        case _:
            tokens = fit.batch * (fit.context if shape.cross_layers else _CHUNK)
            row = itemsize * numbers + shape.scan_bytes
            copies = itemsize * 2 * (shape.heads * shape.row + shape.token_numbers)
            scores = (6 * shape.heads * itemsize if shape.scores else 4) * tokens
            attended = fit.context * (fit.batch * copies + scores) if shape.heads else 0
            return tokens * row + attended + 8 * shape.largest + margin


def _llama_cpp_cache(shape: ContextShape, fit: MemoryFit) -> int:
    bits = fit.kv_bits or 16
    if bits < 16 and shape.row % _ROW_BLOCK:
        raise InvalidConfigError(
            f"llama.cpp keeps keys and values in {bits} bits only where heads have a multiple of {_ROW_BLOCK} numbers, "
            f"and those of this model have {shape.row}; set kv_bits to 16"
        )
    _check_has_no_state(shape, "llama.cpp")
    full, window = _llama_cpp_cells(shape, fit)
    windowed = shape.window_layers if window else 0
    cells = full * (shape.full_layers + shape.window_layers - windowed) + window * windowed
    return int(fit.batch * cells * shape.token_numbers * _LLAMA_CPP_ITEMS[bits])


def _llama_cpp_cells(shape: ContextShape, fit: MemoryFit) -> tuple[int, int]:
    """Return the tokens that layers have room for, and those with a window; 0 if it ignores windows."""
    full = _up(fit.context, _CELLS)
    if not shape.window_layers or shape.family not in _LLAMA_CPP_WINDOWS:
        return full, 0
    return full, _up(min(full, shape.window + _llama_cpp_chunk(fit)), _CELLS)


def _llama_cpp_chunk(fit: MemoryFit) -> int:
    return min(_CHUNK, fit.batch * _up(fit.context, _CELLS))


def _vllm_cache(shape: ContextShape, fit: MemoryFit) -> int:
    bits = fit.kv_bits or 16
    if bits == 4:
        raise InvalidConfigError("vLLM keeps keys and values in 16 or 8 bits; set kv_bits to one of them")
    _check_has_no_state(shape, "vLLM")
    if shape.cross_layers:
        raise InvalidConfigError("vLLM runs no model of this type; use the engine rocket")
    full = _up(fit.context, _VLLM_BLOCK)
    window = _up(min(fit.context, shape.window - 1 + _vllm_step(fit)[0]), _VLLM_BLOCK) + _VLLM_BLOCK
    layers, windowed = shape.full_layers, shape.window_layers
    if layers and windowed:
        # Layers are grouped so that all groups have as many, the last one of each kind filled up.
        size = max(layers, windowed) if max(layers, windowed) < 1.5 * min(layers, windowed) else min(layers, windowed)
        layers, windowed = _up(layers, size), _up(windowed, size)
    return fit.batch * shape.token_numbers * bits // 8 * (full * layers + window * windowed)


def _vllm_step(fit: MemoryFit) -> tuple[int, int]:
    """Return the tokens that it computes at once, and the sequences that it samples for."""
    return _VLLM_LARGE_STEP if fit.memory_bytes >= _LARGE else _VLLM_STEP


def _transformers_cache(shape: ContextShape, fit: MemoryFit, itemsize: int) -> int:
    if fit.kv_bits is not None and fit.kv_bits != 8 * itemsize:
        raise InvalidConfigError(
            f"transformers keeps keys and values as the model is stored, in {8 * itemsize} bits; leave kv_bits out"
        )
    tokens = fit.context * (shape.full_layers + shape.cross_layers)
    tokens += min(fit.context, shape.window - 1) * shape.window_layers
    state = shape.state_layers * (shape.state_numbers * itemsize + shape.state_bytes)
    return fit.batch * (shape.token_numbers * itemsize * tokens + state)


def _check_has_no_state(shape: ContextShape, engine: str) -> None:
    if shape.state_layers:
        raise InvalidConfigError(
            f"what {engine} keeps of the states of a model of type {shape.family} is not known; give target_bytes, or "
            "take the engine rocket"
        )


def _up(count: int, step: int) -> int:
    return -(-count // step) * step
