"""Losses on tokens that the Gram matrix has not seen.

The loss from an error is predicted as if the error of each token were independent of its gradient, and from the tokens
to which the weights are fitted. Neither holds: massive activations have large errors that cost little, and few tokens
determine a wide layer's weights so well that others have twice the error. Both are nearly the same for all candidates
of a layer, so one rounding tells by how much.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from rocket_core.linalg.integer_codes import search_scales
from rocket_core.linalg.rounding import gptq_and_errors
from rocket_core.methods.layer_problem import LayerProblem
from rocket_core.methods.sampled_outputs import output_importance, spread_outputs
from rocket_core.sizes.code_format import CodeFormat

# Outputs that are rounded, of each layer.
_OUTPUTS = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutTokens:
    """Tokens on which losses are estimated.

    Attributes:
        inputs: what the layer reads.
        gradients: for each layer whose weight is a part of the problem's, the squared gradient of each token, relative
            to the mean of all.
    """

    inputs: Float[Tensor, "held d_in"]
    gradients: tuple[Float[Tensor, " held"], ...]


def loss_factors(problem: LayerProblem, tokens: HeldOutTokens) -> tuple[float, ...]:
    """Return for each layer of a problem the loss on tokens relative to what its error over the Gram matrix predicts.

    Args:
        problem: the layers; it has the Gram matrix of the input.
        tokens: tokens that are not in the Gram matrix.
    """
    energies, importance = problem.output_energies(), output_importance(problem)
    code_format = CodeFormat(bits=4, group_size=problem.shape[0], scale_bits=16)
    gram = problem.prepared_gram().rounding
    pairs, begin = [], 0
    for width, gradients in zip(problem.output_widths, tokens.gradients, strict=True):
        outputs = begin + spread_outputs(energies[begin : begin + width], min(width, _OUTPUTS))
        begin += width
        weight = problem.weight[:, outputs].to(problem.precision).contiguous()
        scales = search_scales(weight, gram.matrix.diagonal(), code_format)
        rounded, damped_errors = gptq_and_errors(weight, gram, scales)
        removed = weight - rounded.weight(weight.dtype)
        errors = gram.undamped(damped_errors, removed) * importance[outputs]
        error = errors.sum() / problem.statistics.tokens
        squares = (tokens.inputs @ removed).square().double() @ importance[outputs]
        pairs.append(torch.stack([(squares * gradients).mean(), error]))
    return tuple(found / error if error > 0 else 1.0 for found, error in torch.stack(pairs).tolist())
