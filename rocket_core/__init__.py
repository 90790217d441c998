"""ROCKET: training-free compression of transformer models.

    from rocket_core import compress, compression_config

    report = compress("path/to/model", Path("out"), compression_config(ratio=0.3))

Calibration Gram matrices, whitening, eigenbasis, importance-weighted column sparsity, closed-form dictionary, layer
profiles, and one multiple-choice knapsack over all layers. `import rocket_core.hf` lets `transformers` load the result.

Importing this package loads neither torch nor pydantic; `compress`, `heal` and `profile_model` load what they need when
called.
"""

import inspect
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rocket_core.version import __version__

if TYPE_CHECKING:
    from rocket_core.config import (
        CalibrationConfig,
        CompressionConfig,
        EvaluationConfig,
        HealingConfig,
        compression_config,
        healing_config,
    )
    from rocket_core.errors import RocketError
    from rocket_core.pipeline import compress, heal, profile_model

__all__ = [
    "CalibrationConfig",
    "CompressionConfig",
    "EvaluationConfig",
    "HealingConfig",
    "RocketError",
    "__version__",
    "compress",
    "compression_config",
    "heal",
    "healing_config",
    "profile_model",
]

_MODULES = {
    "CalibrationConfig": "config",
    "CompressionConfig": "config",
    "EvaluationConfig": "config",
    "HealingConfig": "config",
    "RocketError": "errors",
    "compress": "pipeline",
    "compression_config": "config",
    "heal": "pipeline",
    "healing_config": "config",
    "profile_model": "pipeline",
}


class _Deferred:
    """A function whose module is imported when it is first called or inspected."""

    def __init__(self, module: str, name: str) -> None:
        self._module = module
        self.__name__ = name

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._load()(*arguments, **options)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._load())

    @property
    def __wrapped__(self) -> Any:
        return self._load()

    def _load(self) -> Any:
        return getattr(import_module(self._module), self.__name__)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = f"{__name__}.{_MODULES[name]}"
    value = _Deferred(module, name) if _MODULES[name] == "pipeline" else getattr(import_module(module), name)
    globals()[name] = value
    return value
