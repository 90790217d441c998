"""The rule for batches, steps and learning rate of healing, from the amount of text alone."""

import math
from dataclasses import dataclass

import numpy as np

from rocket_core.estimates.healing import healing_steps, windows_per_step

# The first steps of Adam move every number by the whole learning rate, whatever its gradient: about so many steps pass
# before its second moments mean something.
_WARM_UP_PART, _WARM_UP_STEPS, _MOST_WARM_UP_PART = 0.05, 20, 0.4


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """What every step of healing reads, and how far it goes.

    Attributes:
        windows: distinct windows of text.
        windows_per_step: windows that a step reads.
        steps: number of steps, at least 1.
        seed: seed of the order of windows.
    """

    windows: int
    windows_per_step: int
    steps: int
    seed: int

    @classmethod
    def of(cls, tokens: int, *, windows: int, length: int, seed: int) -> "Schedule":
        """Return the schedule for an amount of text, of which windows are read again if there are too few.

        Args:
            tokens: tokens to read, at least 1; rounded to whole steps.
            windows: distinct windows, at least 1.
            length: tokens in a window.
            seed: seed of the order of windows.
        """
        per_step, steps = windows_per_step(tokens, length), healing_steps(tokens, length)
        return cls(windows=windows, windows_per_step=per_step, steps=steps, seed=seed)

    def rate(self, step: int) -> float:
        """Return the learning rate of a step as a part of the largest: a linear warm-up, then a cosine to zero."""
        warm_up = self.warm_up
        if step < warm_up:
            return (step + 1) / warm_up
        return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, self.steps - warm_up)))

    @property
    def warm_up(self) -> int:
        """Steps until the learning rate is largest."""
        wanted = max(_WARM_UP_PART * self.steps, _WARM_UP_STEPS)
        return max(1, round(min(wanted, _MOST_WARM_UP_PART * self.steps)))

    def batch(self, step: int) -> list[int]:
        """Return the indices of the windows that a step reads.

        Every window is read once before any is read again, each time in another order.
        """
        first = step * self.windows_per_step
        found: list[int] = []
        for position in range(first, first + self.windows_per_step):
            turn, place = divmod(position, self.windows)
            found.append(int(self._order(turn)[place]))
        return found

    def _order(self, turn: int) -> np.ndarray:
        return np.random.default_rng((self.seed, turn)).permutation(self.windows)
