"""A GGUF file run by llama.cpp, out of the library that a Python package ships.

Its C functions are called directly, as `llama-bench` does. The server of `xllamacpp` would open a socket, which a
confined job may not. Structures are passed back as they come: they change from version to version, only the first
member of the context's settings, the length of the context, has not, and what it came to is checked.
"""

import ctypes
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from rocket_core.errors import CorruptCheckpointError, InvalidConfigError, RocketError
from rocket_core.report.speed import RoundTimes
from rocket_core.speed.messages import Continue, Continued, Load, Loaded, Measure
from rocket_core.speed.predictions import likeliest

INSTALL = "llama.cpp is not installed: pip install xllamacpp (or llama-cpp-python)"
# The library with the C functions, relative to the package.
_LIBRARIES = {"xllamacpp": "xllamacpp.abi3.so", "llama_cpp": "lib/libllama.so"}


class _Settings(ctypes.Structure):
    """Any structure that is passed by value; larger than all of them, which the calling convention allows."""

    _fields_ = (("words", ctypes.c_uint64 * 128),)


_POINTER = ctypes.c_void_p
_NUMBER = ctypes.c_int32
# Result and arguments of each function that is used.
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_backend_init": (None, ()),
    "llama_supports_gpu_offload": (ctypes.c_bool, ()),
    "llama_model_default_params": (_Settings, ()),
    "llama_model_load_from_file": (_POINTER, (ctypes.c_char_p, _Settings)),
    "llama_model_get_vocab": (_POINTER, (_POINTER,)),
    "llama_model_n_ctx_train": (_NUMBER, (_POINTER,)),
    "llama_vocab_n_tokens": (_NUMBER, (_POINTER,)),
    "llama_context_default_params": (_Settings, ()),
    "llama_init_from_model": (_POINTER, (_POINTER, _Settings)),
    "llama_n_ctx": (ctypes.c_uint32, (_POINTER,)),
    "llama_n_batch": (ctypes.c_uint32, (_POINTER,)),
    "llama_set_n_threads": (None, (_POINTER, _NUMBER, _NUMBER)),
    "llama_get_memory": (_POINTER, (_POINTER,)),
    "llama_memory_clear": (None, (_POINTER, ctypes.c_bool)),
    "llama_batch_get_one": (_Settings, (_POINTER, _NUMBER)),
    "llama_decode": (_NUMBER, (_POINTER, _Settings)),
    "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), (_POINTER, _NUMBER)),
    "llama_tokenize": (
        _NUMBER,
        (_POINTER, ctypes.c_char_p, _NUMBER, ctypes.POINTER(_NUMBER), _NUMBER, ctypes.c_bool, ctypes.c_bool),
    ),
}
# Tokens that may be put around a text.
_SPECIAL_TOKENS = 8
# Contexts are as long as a multiple of this.
_CONTEXT_STEP = 256


class LlamaCppModel:
    """A loaded file.

    Args:
        request: what to load.

    Raises:
        RocketError: llama.cpp is not installed, or its interface is another one.
        CorruptCheckpointError: llama.cpp does not read the file.
    """

    def __init__(self, request: Load) -> None:
        path, self._library = request.subject.path, _library()
        library = self._library
        library.llama_backend_init()
        began = time.perf_counter()
        model = library.llama_model_load_from_file(str(path).encode(), library.llama_model_default_params())
        if not model:
            raise CorruptCheckpointError(f"llama.cpp does not read {path}; make or download it again")
        self._context = self._new_context(model, request.context)
        seconds = time.perf_counter() - began
        library.llama_set_n_threads(self._context, request.threads, request.threads)
        self._words = library.llama_model_get_vocab(model)
        self._vocabulary = library.llama_vocab_n_tokens(self._words)
        self.loaded = Loaded(
            vocabulary=self._vocabulary,
            positions=library.llama_model_n_ctx_train(model),
            device="the accelerator of llama.cpp" if library.llama_supports_gpu_offload() else "cpu",
            dtype=None,
            seconds=seconds,
        )

    def measure(self, request: Measure) -> RoundTimes:
        """Read a prompt and generate greedily; no token ends the answer."""
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)
        batch = self._library.llama_n_batch(self._context)
        began = time.perf_counter()
        for start in range(0, len(request.prompt), batch):
            token = self._read(request.prompt[start : start + batch])
        first = time.perf_counter()
        for _ in range(request.new_tokens - 1):
            token = self._read((token,))
        return RoundTimes(prompt_seconds=first - began, generation_seconds=time.perf_counter() - first)

    def continue_text(self, request: Continue) -> Continued:
        """Split a text, and continue a prompt greedily; no token ends the answer."""
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)
        token, places = self._read(request.prompt), []
        for _ in range(request.new_tokens):
            places.append(likeliest(self._logits(), "llama.cpp"))
            token = self._read((token,))
        return Continued(split=self._split(request.text), places=tuple(places))

    def device_bytes(self) -> int | None:
        """Return None: llama.cpp does not tell what it holds on an accelerator."""
        return None

    def weights_bytes(self) -> int | None:
        """Return None: the weights are mapped from the file, with its size."""
        return None

    def _new_context(self, model: int, tokens: int) -> int:
        settings = self._library.llama_context_default_params()
        length = -(-tokens // _CONTEXT_STEP) * _CONTEXT_STEP
        first = ctypes.cast(ctypes.pointer(settings), ctypes.POINTER(ctypes.c_uint32))
        first[0] = length
        context: int | None = self._library.llama_init_from_model(model, settings)
        if not context:
            raise RocketError(f"llama.cpp cannot hold a context of {length} tokens; ask for fewer")
        if self._library.llama_n_ctx(context) != length:
            raise _unknown_version()
        return context

    def _read(self, tokens: tuple[int, ...]) -> int:
        """Return the likeliest token after some more tokens."""
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        status = self._library.llama_decode(self._context, self._library.llama_batch_get_one(array, len(tokens)))
        if status:
            raise RocketError(f"llama.cpp ends with status {status} while it reads tokens")
        return int(self._logits().argmax())

    def _logits(self) -> Float32[np.ndarray, " vocabulary"]:
        """Return the logits after what was read last."""
        found = self._library.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(found, shape=(self._vocabulary,))

    def _split(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text, with the special ones that are put around it."""
        data = text.encode()
        room = len(data) + _SPECIAL_TOKENS
        array = (ctypes.c_int32 * room)()
        count = self._library.llama_tokenize(self._words, data, len(data), array, room, True, True)
        if count < 0:
            raise RocketError("llama.cpp splits a text into more tokens than it has bytes")
        return tuple(array[:count])


def installed_version() -> str | None:
    """Return the package that llama.cpp comes from, with its version; None if none is installed."""
    found = next(_installed(), None)
    if found is None:
        return None
    name = found[0]
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return name


def _installed() -> Iterator[tuple[str, Path]]:
    """Yield the packages that have the library, with its file."""
    for name, file in _LIBRARIES.items():
        spec = find_spec(name)
        if spec is not None and spec.origin is not None and (path := Path(spec.origin).parent / file).is_file():
            yield name, path


def _library() -> Any:
    found = next(_installed(), None)
    if found is None:
        raise InvalidConfigError(INSTALL)
    library = ctypes.CDLL(str(found[1]))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name, None)
        if function is None:
            raise _unknown_version()
        function.restype, function.argtypes = result, arguments
    return library


def _unknown_version() -> RocketError:
    return RocketError("this version of llama.cpp has another interface; pip install --upgrade xllamacpp")
