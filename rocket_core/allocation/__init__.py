"""Allocation of a parameter budget over layers: one multiple-choice knapsack, solved to proven optimality.

`allocator` turns profiles and a ratio into costs, errors and budget, and back; `cap` finds the paper's cap on errors;
`knapsack` solves; `relaxation` and `label_search` are its linear relaxation and its exact search. Loads no torch.
"""

from rocket_core.allocation.allocator import Allocation, Allocator, chosen, layer_frontiers

__all__ = [
    "Allocation",
    "Allocator",
    "chosen",
    "layer_frontiers",
]
