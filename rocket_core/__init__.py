"""ROCKET: training-free compression of transformer models.

Calibration Gram matrices, whitening, eigenbasis, importance-weighted column sparsity, closed-form dictionary, layer
profiles, and one multiple-choice knapsack over all layers. `rocket_core.pipeline.compress` runs it all;
`import rocket_core.hf` lets `transformers` load the result.

This file imports nothing, so that the parts without torch can be used without it.
"""

__version__ = "0.1.0"
