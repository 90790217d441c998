"""The loss of healing."""

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional


def divergence_sum(
    dense: Float[Tensor, "*tokens vocabulary"], compressed: Float[Tensor, "*tokens vocabulary"]
) -> Float[Tensor, ""]:
    """Compute the Kullback-Leibler divergence of next-token distributions, summed over tokens.

    Computes Σᵢ Σᵥ pᵢᵥ (log pᵢᵥ - log qᵢᵥ), p = softmax(dense), q = softmax(compressed), in float32 unless the logits
    are wider. Differentiable; `evaluation.divergence` measures the same without gradients, in float64.

    Args:
        dense: logits of the dense model.
        compressed: logits of the compressed model for the same tokens, on the same device.

    Returns:
        The sum in nats.
    """
    wide = dense.float() if dense.dtype.itemsize < 4 else dense
    log_p, log_q = wide.log_softmax(-1), compressed.to(wide.dtype).log_softmax(-1)
    return functional.kl_div(log_q, log_p, reduction="sum", log_target=True)
