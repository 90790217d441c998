"""Engines that compressed models are made for, each described in a file. Loads no torch."""

from collections.abc import Mapping
from types import MappingProxyType

from rocket_core.engines.engine import Engine, EngineName, ExportKind, Kind, LaterExport
from rocket_core.engines.llama_cpp import LLAMA_CPP
from rocket_core.engines.rocket import ROCKET
from rocket_core.engines.vllm import VLLM

__all__ = ["ENGINES", "PUSHED_FIRST", "ROCKET", "Engine", "EngineName", "ExportKind", "Kind", "LaterExport"]

PUSHED_FIRST: tuple[ExportKind, ...] = ("factored", "gguf", "compressed-tensors", "dense")
"""Exports by precedence: without a choice, the first that a job has is pushed to the Hub."""
ENGINES: Mapping[EngineName, Engine] = MappingProxyType({engine.name: engine for engine in (ROCKET, VLLM, LLAMA_CPP)})
