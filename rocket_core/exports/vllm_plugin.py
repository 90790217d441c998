"""A plugin of vLLM that loads artifacts of this library.

    vllm serve ARTIFACT --load-format rocket

Layers of codes run in vLLM's kernels for compressed-tensors where these take them without a change; all others are
decoded to dense weights when they are loaded. vLLM finds the plugin by its entry point in `vllm.general_plugins`.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from vllm.config import ModelConfig, get_current_vllm_config
from vllm.model_executor.kernels.linear import choose_mp_linear_kernel
from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearLayerConfig
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.scalar_type import scalar_types

from rocket_core.errors import InvalidConfigError
from rocket_core.exports.exact_formats import compressed_tensors_config
from rocket_core.exports.kernel_layers import kernel_formats, kernel_tensors
from rocket_core.exports.stored_artifact import StoredArtifact, open_artifact
from rocket_core.layers import QUANT_METHOD

_ALL_DENSE = {"format": "pack-quantized", "config_groups": {}, "ignore": ["re:.*"]}
_TYPES = {8: scalar_types.uint8b128, 4: scalar_types.uint4b8}
_SIDE, _GROUP = 1024, 128


class RocketQuantization(CompressedTensorsConfig):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """The formats of an artifact's layers in vLLM."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "RocketQuantization":
        """Return a description without layers: the table in `config.json` does not tell their shapes."""
        return cls(target_scheme_map={}, ignore=[], quant_format="pack-quantized", config=config)

    def maybe_update_config(self, model_name: str, revision: str | None = None, **_: Any) -> None:
        """Describe the layers of the artifact."""
        artifact = _opened(model_name, revision)
        config = compressed_tensors_config(artifact, kernel_formats(artifact, _widest())) or _ALL_DENSE
        self.__dict__.update(vars(CompressedTensorsConfig.from_config(config)))

    def get_name(self) -> str:
        """Return the name of the method in `config.json`."""
        return QUANT_METHOD

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """See `CompressedTensorsConfig`.

        Raises:
            InvalidConfigError: vLLM would read the files as they are.
        """
        if get_current_vllm_config().load_config.load_format != QUANT_METHOD:
            raise InvalidConfigError(f"the model was compressed by Rocket; add --load-format {QUANT_METHOD}")
        return super().get_quant_method(layer, prefix)


class RocketLoader(DefaultModelLoader):  # type: ignore[misc]
    """Reader of an artifact's weights."""

    def download_model(self, model_config: ModelConfig) -> None:
        """Download an artifact from the Hub, if it is not a folder."""
        _opened(model_config.model, model_config.revision)

    def get_all_weights(self, model_config: ModelConfig, _model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors, one in memory at a time."""
        self.counter_before_loading_weights = time.perf_counter()
        artifact = _opened(model_config.model, model_config.revision)
        # vLLM makes tensors on the model's device unless it is told otherwise.
        with torch.device("cpu"):
            yield from kernel_tensors(artifact, kernel_formats(artifact, _widest()))


def register() -> None:
    """Register the format; vLLM calls this in each of its processes."""
    register_quantization_config(QUANT_METHOD)(RocketQuantization)
    register_model_loader(QUANT_METHOD)(RocketLoader)


def _widest() -> int:
    """Return the bits of the widest codes that this machine has a kernel for; 0 for none."""
    return next((bits for bits in _TYPES if _has_kernel(bits)), 0)


def _has_kernel(bits: int) -> bool:
    shape = (_SIDE, _SIDE)
    layer = MPLinearLayerConfig(shape, shape, _TYPES[bits], torch.bfloat16, _GROUP, zero_points=False)
    try:
        kernel = choose_mp_linear_kernel(layer)
    except ValueError:
        return False
    # vLLM chooses this one also where the CPU lacks its instructions, and where it fails: with AMX, version 0.32
    # divides inputs into blocks of 128, which 192 are not.
    works = hasattr(torch.ops._C, "cpu_gemm_wna16") and not torch.cpu._is_amx_tile_supported()
    return kernel is not CPUWNA16LinearKernel or works


def _opened(model: str, revision: str | None) -> StoredArtifact:
    folder = Path(model)
    return open_artifact(folder if folder.is_dir() else Path(snapshot_download(model, revision=revision)))
