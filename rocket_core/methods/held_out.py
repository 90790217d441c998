"""Losses on tokens that the Gram matrix has not seen.

The loss from an error is predicted as if the error of each token were independent of its gradient, and from the tokens
to which the weights are fitted. Neither holds: massive activations have large errors that cost little, and few tokens
determine a wide layer's weights so well that others have twice the error. Both are nearly the same for all candidates
of a layer, so one rounding tells by how much.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from rocket_core.linalg.integer_codes import search_scales
from rocket_core.linalg.rounding import gptq_and_errors
from rocket_core.methods.layer_problem import LayerProblem
from rocket_core.methods.sampled_outputs import output_importance, spread_outputs
from rocket_core.sizes.code_format import CodeFormat

# Outputs that are rounded.
_OUTPUTS = 128


def loss_factor(problem: LayerProblem, inputs: Float[Tensor, "held d_in"], gradients: Float[Tensor, " held"]) -> float:
    """Return the loss of a layer on tokens relative to what its error over the Gram matrix predicts.

    Args:
        problem: the layer; it has the Gram matrix of the input.
        inputs: what the layer reads of tokens that are not in the Gram matrix.
        gradients: squared gradient of each token at the layer's output, relative to the mean of all.
    """
    importance = output_importance(problem)
    code_format = CodeFormat(bits=4, group_size=problem.shape[0], scale_bits=16)
    gram = problem.prepared_gram().rounding
    outputs = spread_outputs(problem.output_energies(), min(problem.shape[1], _OUTPUTS))
    weight = problem.weight[:, outputs].to(problem.precision).contiguous()
    rounded, damped_errors = gptq_and_errors(weight, gram, search_scales(weight, gram.matrix.diagonal(), code_format))
    removed = weight - rounded.weight(weight.dtype)
    errors = gram.undamped(damped_errors, removed) * importance[outputs]
    squares = (inputs @ removed).square().double() @ importance[outputs]
    pair = torch.stack([(squares * gradients).mean(), errors.sum() / problem.statistics.tokens])
    found, predicted = pair.tolist()
    return found / predicted if predicted > 0 else 1.0
