"""Allocation of a parameter budget over layers: one multiple-choice knapsack, solved to proven optimality.

`allocator` turns profiles and a ratio into costs, errors and budget, and back; `cap` finds the paper's cap on errors;
`knapsack` solves; `relaxation` and `label_search` are its linear relaxation and its exact search. Loads no torch.
"""

from rocket_core.allocation.allocator import (
    Allocation,
    Allocator,
    allocate,
    chosen,
    layer_frontiers,
    reachable_ratio,
)
from rocket_core.allocation.cap import smallest_cap
from rocket_core.allocation.knapsack import KnapsackSolution, solve_knapsack

__all__ = [
    "Allocation",
    "Allocator",
    "KnapsackSolution",
    "allocate",
    "chosen",
    "layer_frontiers",
    "reachable_ratio",
    "smallest_cap",
    "solve_knapsack",
]
