"""A plugin of vLLM that adds what its CPU kernels lack: codes of 8 bits, and of 4 bits where a CPU has no AVX-512.

They are decoded once, and multiplied as a dense weight.

On GPUs vLLM has kernels for them; this shows that it reads the files, not how fast it is.
"""

import torch
from vllm.model_executor.kernels.linear import register_linear_kernel
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel, MPLinearLayerConfig
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


def register() -> None:
    """Add the kernel; vLLM calls this in each of its processes."""
    register_linear_kernel(ReferenceKernel, PlatformEnum.CPU, "mp")
