"""Training of the numbers that a compressed model stores as they are; supports and codes stay fixed.

Continuous are coefficients, atoms, scales stored as float16, and everything that was never compressed: norms, biases,
layers that stayed dense. Codes are not, and neither are scales on a logarithmic grid, which are codes themselves, nor
the tables of quantized embeddings. `open_values` prepares a module for training in float32, and `close_values` returns
it to the form that is stored: with the same tensors, in which only `continuous_names` may differ.
"""

from rocket_core.refinement.scaled_linear import ScaledLinear
from rocket_core.refinement.trainable import close_values, continuous_names, open_values

__all__ = ["ScaledLinear", "close_values", "continuous_names", "open_values"]
