"""Experts of mixture models as separate linear layers.

transformers stores the experts of a block in three-dimensional parameters. `layout` describes how, `module` computes
the same with an `nn.Linear` for each matrix, `unfusing` replaces one by the other, and `names` adapts the names that
checkpoints have.
"""

from rocket_core.experts.layout import ExpertPart, FusedParameter, StoredMatrix
from rocket_core.experts.module import Expert, UnfusedExperts, following_router, visiting
from rocket_core.experts.names import expert_projection, is_expert_name, unfused_conversions
from rocket_core.experts.unfusing import (
    find_fused,
    fuse,
    fused_parameters,
    has_unfused,
    unfuse,
    unfused_modules,
    unknown_experts,
)

__all__ = [
    "Expert",
    "ExpertPart",
    "FusedParameter",
    "StoredMatrix",
    "UnfusedExperts",
    "expert_projection",
    "find_fused",
    "following_router",
    "fuse",
    "fused_parameters",
    "has_unfused",
    "is_expert_name",
    "unfuse",
    "unfused_conversions",
    "unfused_modules",
    "unknown_experts",
    "visiting",
]
