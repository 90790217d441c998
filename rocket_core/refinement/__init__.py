"""Training of what a compressed model stores, without a change of its size.

Continuous are coefficients, atoms, scales stored as float16, and everything that was never compressed: norms, biases,
layers that stayed dense. Codes are not, and neither are scales on a logarithmic grid, which are codes themselves, nor
the tables of quantized embeddings. `open_values` prepares a module for training in float32, and `close_values` returns
it to the form that is stored: with the same tensors, in which only `continuous_names` may differ.

`BlockTuning` trains one block towards the output of the dense one, and for what follows from it; with `LearntCodes`,
the codes of its quantized layers change as well.
"""

from rocket_core.refinement.learnt_codes import LearntCodes
from rocket_core.refinement.scaled_linear import ScaledLinear
from rocket_core.refinement.trainable import close_values, continuous_names, open_values, round_values
from rocket_core.refinement.tuning import BlockErrors, BlockTuning

__all__ = [
    "BlockErrors",
    "BlockTuning",
    "LearntCodes",
    "ScaledLinear",
    "close_values",
    "continuous_names",
    "open_values",
    "round_values",
]
