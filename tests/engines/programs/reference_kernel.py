"""A plugin of vLLM that adds what its CPU kernels lack: codes of 8 bits, decoded once, then a dense product.

On GPUs vLLM has kernels for them; this shows that it reads the files, not how fast it is.
"""

import torch
from vllm.model_executor.kernels.linear import register_linear_kernel
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel, MPLinearLayerConfig
from vllm.platforms import PlatformEnum
from vllm.scalar_type import scalar_types


class ReferenceKernel(MPLinearKernel):
    """Codes of 8 bits with an offset of 128 and one scale for each group."""

    @classmethod
    def get_min_capability(cls) -> int:
        """Return that no GPU is needed."""
        return -1

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """Take symmetric codes of 8 bits."""
        return c.weight_type == scalar_types.uint8b128 and not c.zero_points, "it takes symmetric codes of 8 bits"

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Decode the weight."""
        packed, scales, _ = self._get_weight_params(layer)
        codes = packed.data.contiguous().view(torch.uint8).to(scales.dtype) - 128
        weight = codes.view(*scales.shape, -1) * scales.data[:, :, None]
        layer.decoded = torch.nn.Parameter(weight.flatten(1), requires_grad=False)

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply by the decoded weight."""
        return torch.nn.functional.linear(x, layer.decoded, bias)


def register() -> None:
    """Add the kernel; vLLM calls this in each of its processes."""
    register_linear_kernel(ReferenceKernel, PlatformEnum.CPU, "mp")
