"""Healing: training of what a compressed model stores as numbers, towards the predictions of its dense original.

`schedule` decides about batches and learning rates, `trainer` takes the steps. Both know nothing of files.
"""

from rocket_core.healing.divergence import divergence_sum
from rocket_core.healing.schedule import Schedule
from rocket_core.healing.trainer import HealingText, Trainer, recompute_blocks

__all__ = ["HealingText", "Schedule", "Trainer", "divergence_sum", "recompute_blocks"]
