"""A plugin of vLLM that adds what its CPU kernels lack: integer codes of 8 bits, those of 4 without AVX-512, and NVFP4.

All are decoded once, NVFP4 by the function that vLLM emulates its kernels with, then a dense product is computed.

On GPUs vLLM has kernels for them; this shows that it reads the files, not how fast it is.
"""

import torch
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear import register_linear_kernel
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel, MPLinearLayerConfig
from vllm.model_executor.kernels.linear.nvfp4 import NvFp4LinearKernel, NvFp4LinearLayerConfig
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype
from vllm.platforms import PlatformEnum
from vllm.scalar_type import scalar_types


class ReferenceKernel(MPLinearKernel):
    """Codes of 4 or 8 bits with an offset of half of their range and one scale for each group."""

    @classmethod
    def get_min_capability(cls) -> int:
        """Return that no GPU is needed."""
        return -1

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """Take symmetric codes."""
        taken = c.weight_type in (scalar_types.uint4b8, scalar_types.uint8b128) and not c.zero_points
        return taken, "it takes symmetric codes of 4 or 8 bits"

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Decode the weight."""
        packed, scales, _ = self._get_weight_params(layer)
        codes = packed.data.contiguous().view(torch.uint8)
        if self.config.weight_type == scalar_types.uint4b8:
            codes = torch.stack((codes & 15, codes >> 4), dim=-1)
        offset = 8 if self.config.weight_type == scalar_types.uint4b8 else 128
        weight = (codes.to(scales.dtype) - offset).view(*scales.shape, -1) * scales.data[:, :, None]
        layer.decoded = torch.nn.Parameter(weight.flatten(1), requires_grad=False)

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply by the decoded weight."""
        return torch.nn.functional.linear(x, layer.decoded, bias)


class ReferenceNvFp4Kernel(NvFp4LinearKernel):
    """NVFP4 weights with inputs in 16 bits."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Return that it runs on any device."""
        return True, None

    @classmethod
    def can_implement(cls, config: NvFp4LinearLayerConfig) -> tuple[bool, str | None]:
        """Take any layer."""
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Decode the weight."""
        parts = (layer.weight.data, layer.weight_scale.data, layer.weight_global_scale.data)
        weight = dequantize_to_dtype(*parts, torch.get_default_dtype(), swizzle=False)
        layer.decoded = torch.nn.Parameter(weight, requires_grad=False)

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply by the decoded weight."""
        return torch.nn.functional.linear(x, layer.decoded, bias)


def register() -> None:
    """Add the kernels; vLLM calls this in each of its processes."""
    register_linear_kernel(ReferenceKernel, PlatformEnum.CPU, "mp")
    # What vLLM takes for weights alone wherever Blackwell is not found, without looking for others.
    linear.MarlinNvFp4LinearKernel = ReferenceNvFp4Kernel
