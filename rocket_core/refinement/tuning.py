"""Tuning of a block: gradient steps that bring its output, and what follows from it, closer to the dense model's."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rocket_core.refinement.learnt_codes import LearntCodes, shorten

STEPS = 100
"""Gradient steps for each block, whatever its size; each takes one batch."""

# Largest step: for numbers as a part of their root mean square, times the block's relative error, which is about what
# they have to change by; for codes in units of their scale.
_NUMBERS_STEP = 0.06
_CODES_STEP = 0.01
_WARM_UP = 10
_DECAYS = (0.9, 0.99)
# A bias of zeros can be changed as well.
_LEAST_SIZE = 1e-3
# One batch in so many is not trained on.
_HELD_OUT = 8
# What the squared difference to the targets counts, where an error further on can be measured.
_OWN = 0.1
# Tests of the block on batches that are held out.
_TESTS = 4
# Price of bits at first: the part of the block's error before that layers of half the bits would have to remove.
_BIT_PRICE = 1.0
# Growth of the price at a step in which layers take 1 % more bits than they should, and its bound; and how much dearer
# bits are during that step alone, as the price would otherwise overshoot: codes need many steps to follow it.
_PRICE_GROWTH, _MOST_GROWTH = 0.03, 0.1
_PRICE_DAMPING, _MOST_DAMPING = 0.5, 1.5
# Bits that layers should take less than at first, as a part of them, so that their bytes are not more.
_BITS_LEFT = 0.001

_State: TypeAlias = tuple[list[Tensor], list[tuple[Tensor, Tensor | None]]]
"""Numbers, then positions of learnt codes and which of these are shortened."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockErrors:
    """What tuning minimises, on the batches that are held out, per token.

    Without a continuation it is the squared difference to the targets. Otherwise that counts a tenth, and the error of
    the continuation the rest, in a unit in which both are equal before tuning.

    Attributes:
        before: before tuning: the mean squared difference to the targets.
        after: after tuning; never larger.
    """

    before: float
    after: float


class BlockTuning:
    """Training of a block towards given outputs.

    Adam on one batch at a time, in float32: on numbers in proportion to their tensor's root mean square and to the
    error of the block, and on the positions of learnt codes in units of their scale, so that nothing has to be tuned
    for a model. Entropy-coded layers pay for their bits at one price, which grows while they take more together than at
    first, and falls while fewer.

    Args:
        block: the block, opened for training.
        predict: returns the block's output for a batch, with its graph.
        targets: the output to come close to, by batch; at least two batches.
        dtypes: dtype in which each parameter is stored, by name; positions of codes have none.
        further: returns the error that the block's output leads to in what follows, per token, given the batch; None
            if nothing does.
    """

    def __init__(
        self,
        block: nn.Module,
        predict: Callable[[int], Tensor],
        targets: Sequence[Tensor],
        dtypes: Mapping[str, torch.dtype],
        further: Callable[[int, Tensor], Tensor] | None = None,
    ) -> None:
        self._predict, self._targets, self._further = predict, targets, further
        # What an error further on counts, in units of the squared difference.
        self._worth = 0.0
        self._numbers = [(block.get_parameter(name), dtype) for name, dtype in dtypes.items()]
        self._codes = [part for part in block.modules() if isinstance(part, LearntCodes)]
        self._held_out = range(0, len(targets), _HELD_OUT)
        self._trained = [batch for batch in range(len(targets)) if batch not in self._held_out]
        self._coded = [layer for layer in self._codes if layer.entropy_coded]
        with torch.no_grad():
            self._bits_before = sum(float(layer.bits()) for layer in self._coded)
        self._price = _BIT_PRICE

    def complete(self, *, seed: int, on_step: Callable[[float], None]) -> BlockErrors:
        """Train the block, and leave it in the best of the states that were tested on the held-out batches.

        Args:
            seed: of the order of batches.
            on_step: called before each step with the completed part; may raise an error to stop.

        Returns:
            The errors on the held-out batches, as the block is stored.
        """
        optimizer = torch.optim.Adam(self._groups(self._relative_error()), betas=_DECAYS)
        self._weigh()
        before, best = self._test()
        errors = BlockErrors(before=before, after=before)
        if before == 0:
            return errors
        generator = torch.Generator().manual_seed(seed)
        order: list[int] = []
        for step in range(STEPS):
            on_step(step / STEPS)
            order = order or [self._trained[place] for place in torch.randperm(len(self._trained), generator=generator)]
            for group in optimizer.param_groups:
                group["lr"] = group["largest"] * _schedule(step)
            self._learn(optimizer, order.pop(), before)
            if (step + 1) % (STEPS // _TESTS) == 0:
                error, state = self._test()
                if error < errors.after:
                    errors, best = BlockErrors(before=before, after=error), state
        self._restore(best)
        return errors

    def _learn(self, optimizer: torch.optim.Optimizer, batch: int, scale: float) -> None:
        optimizer.zero_grad()
        loss = self._error(batch) / scale
        if self._coded:
            bits = torch.stack([layer.bits() for layer in self._coded]).sum() / self._bits_before
            percent = 100 * (float(bits.detach()) - (1 - _BITS_LEFT))
            loss = loss + self._price * _limited_exp(_PRICE_DAMPING * percent, _MOST_DAMPING) * bits
            self._price *= _limited_exp(_PRICE_GROWTH * percent, _MOST_GROWTH)
        loss.backward()  # type: ignore[no-untyped-call]  # of torch
        optimizer.step()

    def _error(self, batch: int) -> Float[Tensor, ""]:
        own, further = self._parts(batch)
        return own if further is None else _OWN * own + self._worth * further

    def _parts(self, batch: int) -> tuple[Float[Tensor, ""], Float[Tensor, ""] | None]:
        """Return the squared difference to the targets per token, and the error further on."""
        target = self._targets[batch].float()
        output = self._predict(batch)
        own = (output - target).square().sum() / target[..., 0].numel()
        return own, None if self._further is None else self._further(batch, output)

    @torch.no_grad()
    def _weigh(self) -> None:
        """Decide what an error further on counts; nothing where no block follows."""
        if self._further is None:
            return
        parts = [self._parts(batch) for batch in self._held_out]
        own, further = (
            math.fsum(float(part) for part in found if part is not None) for found in zip(*parts, strict=True)
        )
        if further <= 0:
            self._further = None
            return
        self._worth = (1 - _OWN) * own / further

    @torch.no_grad()
    def _test(self) -> tuple[float, _State]:
        """Return the error of the block as it would be stored, on the held-out batches, and that state."""
        current = self._state()
        for number, dtype in self._numbers:
            number.copy_(number.to(dtype))
        shorten(self._codes)
        error = sum(float(self._error(batch)) for batch in self._held_out) / len(self._held_out)
        tested = self._state()
        self._restore(current)
        return error, tested

    def _state(self) -> _State:
        numbers = [number.detach().clone() for number, _ in self._numbers]
        return numbers, [(layer.position.detach().clone(), layer.shortened) for layer in self._codes]

    @torch.no_grad()
    def _restore(self, state: _State) -> None:
        for (number, _), value in zip(self._numbers, state[0], strict=True):
            number.copy_(value)
        for layer, (position, shortened) in zip(self._codes, state[1], strict=True):
            layer.position.copy_(position)
            layer.shortened = shortened

    @torch.no_grad()
    def _relative_error(self) -> float:
        """Return the root of the part of a coordinate's variance that the block errs by: the median over coordinates.

        A few coordinates of hidden states may be larger than all others together.
        """
        targets = torch.cat([self._targets[batch].float().flatten(0, -2) for batch in self._held_out])
        outputs = torch.cat([self._predict(batch).flatten(0, -2) for batch in self._held_out])
        variance = targets.var(dim=0, correction=0).clamp_min(torch.finfo(torch.float32).tiny)
        return min(1.0, float(((outputs - targets).square().mean(dim=0) / variance).median().sqrt()))

    def _groups(self, relative_error: float) -> list[dict[str, Any]]:
        """Return the parameters with their largest steps."""
        groups: list[dict[str, Any]] = []
        for number, _ in self._numbers:
            size = float(number.detach().square().mean().sqrt())
            groups.append({"params": [number], "largest": _NUMBERS_STEP * relative_error * max(size, _LEAST_SIZE)})
        if self._codes:
            groups.append({"params": [layer.position for layer in self._codes], "largest": _CODES_STEP})
        return groups


def _limited_exp(exponent: float, most: float) -> float:
    return math.exp(max(-most, min(most, exponent)))


def _schedule(step: int) -> float:
    """Return the size of a step as a part of the largest: a short rise, and a fall along a cosine."""
    return min(1.0, (step + 1) / _WARM_UP) * (1 + math.cos(math.pi * step / STEPS)) / 2
