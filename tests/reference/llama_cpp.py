"""The quantizers of llama.cpp itself, out of the library that `xllamacpp` ships."""

import ctypes
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
import pytest


def quantize(rows, block_type, importance=None):
    """Return the bytes that llama.cpp makes of rows, with an importance of each input if there is one."""
    pytest.importorskip("xllamacpp", reason="llama.cpp is needed: pip install xllamacpp")
    library = ctypes.CDLL(str(Path(find_spec("xllamacpp").origin).with_name("xllamacpp.abi3.so")))
    function = library.ggml_quantize_chunk
    function.restype = ctypes.c_size_t
    function.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    kind = gguf.GGMLQuantizationType[block_type]
    rows = np.ascontiguousarray(rows, dtype=np.float32)
    (count, length), (size, block_bytes) = rows.shape, gguf.GGML_QUANT_SIZES[kind]
    packed = np.empty((count, length // size * block_bytes), dtype=np.uint8)
    weights = None if importance is None else np.ascontiguousarray(importance, dtype=np.float32)
    pointer = None if weights is None else weights.ctypes.data
    written = function(int(kind), rows.ctypes.data, packed.ctypes.data, 0, count, length, pointer)
    assert written == packed.nbytes
    return packed


def dequantize(packed, block_type):
    """Return the rows that bytes stand for."""
    return gguf.dequantize(packed, gguf.GGMLQuantizationType[block_type])
