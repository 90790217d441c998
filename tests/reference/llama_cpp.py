"""llama.cpp itself, out of the library that `xllamacpp` ships: its quantizers, and its engine."""

import ctypes
import json
import re
import subprocess
import sys
import urllib.request
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


class Engine:
    """llama.cpp running a file on one thread, as its own server."""

    def __init__(self, path, *, projector=None, context=256):
        xllamacpp = pytest.importorskip("xllamacpp", reason="llama.cpp is needed: pip install xllamacpp")
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.mmproj.path = "" if projector is None else str(projector)
        params.n_ctx = context
        params.n_parallel = 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        # As exact as transformers.
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.warmup = False
        self._server = xllamacpp.Server(params)

    def _post(self, path, body):
        request = urllib.request.Request(
            self._server.listening_address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.load(response)

    def prompt(self, before, image, after):
        """Return a prompt for `greedy` with an image, the content of a file in base64, between texts."""
        with urllib.request.urlopen(self._server.listening_address + "/props", timeout=120) as response:
            marker = json.load(response)["media_marker"]
        return {"prompt_string": before + marker + after, "multimodal_data": [image]}

    def tokens(self, text):
        """Return the tokens of a text, with those that are added to it."""
        return self._post("/tokenize", {"content": text, "add_special": True, "parse_special": True})["tokens"]

    def greedy(self, prompt, count):
        """Return the most likely tokens after a prompt, and the logarithms of their probabilities."""
        body = {
            "prompt": prompt,
            "n_predict": count,
            "temperature": 0,
            "return_tokens": True,
            "cache_prompt": False,
            "ignore_eos": True,
            "n_probs": 1,
            "post_sampling_probs": False,
        }
        answer = self._post("/completion", body)
        return answer["tokens"], [place["logprob"] for place in answer["completion_probabilities"]]


_ALLOCATE = """
import sys
import xllamacpp

params = xllamacpp.CommonParams()
params.model.path, params.warmup, params.verbosity = sys.argv[1], False, 5
params.n_ctx, params.n_parallel = int(sys.argv[2]), int(sys.argv[3])
params.cache_type_k = params.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{sys.argv[4]}")
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
xllamacpp.Server(params)
"""


def allocated(path, context, batch, kind):
    """Return the bytes of keys and values, and of the buffers for computing, that llama.cpp says it allocates.

    Args:
        path: the file.
        context: tokens of a sequence.
        batch: number of sequences.
        kind: type of keys and values.
    """
    pytest.importorskip("xllamacpp", reason="llama.cpp is needed: pip install xllamacpp")
    arguments = [sys.executable, "-c", _ALLOCATE, str(path), str(context * batch), str(batch), kind]
    # Until it serves: a server that ends at once may wait for itself.
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "update_slots: all slots are idle" in line:
                break
        process.kill()
    # It measures before it loads the model, and says so without allocating.
    said = "".join(lines).rpartition("CPU_Mapped model buffer size")[2]
    caches = re.findall(r"KV buffer size =\s+([\d.]+) MiB", said)
    buffers = re.findall(r"(?:output|compute) buffer size =\s+([\d.]+) MiB", said)
    assert caches, lines[-20:]
    assert buffers, lines[-20:]
    return sum(map(float, caches)) * 2**20, sum(map(float, buffers)) * 2**20
