"""Time needed by sequential compression and by refinement, beyond that of the layers themselves. Loads no torch.

Numbers of passes were fitted to the processor time of Llamas with 192, 512 and 2,048 hidden units, at 2,048 to 65,536
tokens, on one thread of an AMD EPYC (Zen 5); `python -m benchmarks.duration` compares estimates with measured times.
"""

from collections import Counter
from collections.abc import Sequence

from rocket_core.estimates.operations import FLOAT32_BYTES, Operations
from rocket_core.sizes.budget import Shape

# Passes of calibration data through a block, of both models together: up to each input that layers read, with what
# attention returned kept.
_PASSES = 3.6
# Matrices of sums for each input; of texts that are read in both directions.
_SUMS, _WHOLE_TEXT_SUMS = 2, 5
# Products in float64 for a target and its error, and operations in float32 that take as long as one in float64: of a
# product, and of a solution by LAPACK.
_PRODUCTS, _DOUBLE, _SOLVED_DOUBLE = 3, 2.0, 2.5
# Shared dictionaries whose errors may win, as sweeps improve them: products, and passes over the weight, to search for
# them at all ratios. That is so for layers that together have at least so many outputs for each input.
_SEARCH_PRODUCTS, _SEARCH_PASSES, _LEAST_OUTPUTS = 80, 4700, 2
# Refinement: gradient steps, passes over the weights for each, its seconds on any machine, for a block and for each of
# its layers, and the most tokens that it takes; tests, each a pass through two blocks, and the part of the tokens that
# is held out for them.
_STEPS, _STEP_PASSES, _MOST_STEP_TOKENS = 100, 20, 1024
_STEP_SECONDS, _LAYER_SECONDS = 0.012, 0.0018
_TESTS, _HELD_OUT = 6, 8
# Products of a weight in a step: forward and backward, with gradients of the weight, and without in the next block.
_STEP_PRODUCTS = 5


def searching_dictionaries(block: Sequence[Shape]) -> Operations:
    """Return the operations to search for dictionaries that the layers of a block share, where these are swept.

    Args:
        block: `(d_in, d_out)` of its layers.
    """
    # Layers of one shape that read the same input, such as gate and up.
    outputs: dict[int, int] = {}
    for (d_in, d_out), layers in Counter(block).items():
        if layers > 1:
            outputs[d_in] = max(outputs.get(d_in, 0), layers * d_out)
    found = Operations()
    for d_in, together in outputs.items():
        if together >= _LEAST_OUTPUTS * d_in:
            found += Operations(
                products=_SEARCH_PRODUCTS * 2 * d_in**2 * together,
                memory=_SEARCH_PASSES * d_in * together * FLOAT32_BYTES,
            )
    return found


def following_inputs(
    block: Sequence[Shape], forward: Operations, *, gram_numbers: int, tokens: float, whole_texts: bool
) -> Operations:
    """Return the operations to sum up what the layers of a block read in both models, and to find their targets.

    Args:
        block: `(d_in, d_out)` of its layers.
        forward: operations of a pass of all tokens through the block.
        gram_numbers: numbers in the Gram matrices of all inputs of the block.
        tokens: calibration tokens.
        whole_texts: whether text is read in both directions.
    """
    sums = (_WHOLE_TEXT_SUMS if whole_texts else _SUMS) * 2 * gram_numbers * tokens
    targets = sum(_PRODUCTS * _DOUBLE * 2 * d_in**2 * d_out for d_in, d_out in block)
    solved = sum(_SOLVED_DOUBLE * (2 / 3 * d_in**3 + 2 * d_in**2 * d_out) for d_in, d_out in block)
    return forward.times(_PASSES) + Operations(products=sums + targets + solved)


def step_tokens(tokens: int) -> int:
    """Return the tokens of a gradient step of refinement, given those of the calibration."""
    return min(_MOST_STEP_TOKENS, tokens // _HELD_OUT)


def refining(parameters: int, activations: Operations, *, layers: int, tokens: int, active_part: float) -> Operations:
    """Return the operations to refine a block.

    Args:
        parameters: its parameters.
        layers: number of its layers.
        activations: what a gradient step does in addition to products: passes over activations.
        tokens: calibration tokens.
        active_part: part of the parameters that a token passes.
    """
    passed = parameters * active_part
    step = Operations(
        products=_STEP_PRODUCTS * 2 * passed * step_tokens(tokens),
        memory=_STEP_PASSES * parameters * FLOAT32_BYTES,
        seconds=_STEP_SECONDS + _LAYER_SECONDS * layers,
    )
    tests = Operations(products=_TESTS * 2 * 2 * passed * tokens / _HELD_OUT)
    return (step + activations).times(_STEPS) + tests
