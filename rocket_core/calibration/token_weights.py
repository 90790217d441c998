"""How much each calibration token counts, by the gradients of the loss."""

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from rocket_core.calibration.sensitivity import Sensitivity
from rocket_core.linalg.gram_sum import gram_matrix

# The powers of the squared gradients of a token in its weight. In profiles, that of the least KL on SmolLM2-135M at 4
# bits; where layers are compressed one after another, 0 to 0.375 are alike and 0.75 costs stories260K a tenth at 0.5.
PROFILE_POWER = 0.75
SEQUENTIAL_POWER = 0.2
# Squared gradients below this part of their mean are alike.
_LEAST = 1e-6
# Strength of the ridge regression, relative to the variance of each feature: of 0.02 to 0.5, the best on SmolLM2-135M.
_RIDGE = 0.5


class TokenWeights:
    """Weights of the tokens that the layers of a block read.

    A token's error costs its squared gradient times its squared error. In some models the first tokens of a window have
    most of all gradients. The last windows have been differentiated; for tokens of the others, the logarithm of their
    gradients is predicted from the block's input and the position in the window, by ridge regression.

    Args:
        sensitivities: returns what is known of a layer.
        hidden: input of the block, by batch.
        measured: number of the last tokens of `hidden` that have been differentiated; 0 if all have.
        power: that of a token's squared gradients in its weight; 1 counts errors by what they cost the original.
    """

    def __init__(
        self,
        sensitivities: Callable[[str], Sensitivity | None],
        hidden: Sequence[Float[Tensor, "windows tokens width"]],
        measured: int,
        *,
        power: float,
    ) -> None:
        self._sensitivities = sensitivities
        self._hidden = hidden
        self._measured = measured
        self._power = power

    def of(self, layers: Sequence[str]) -> Float[Tensor, " tokens"] | None:
        """Return how much each token counts in the Gram matrix of what layers read, with mean 1; None if not known.

        Args:
            layers: the layers; each counts in proportion to its gradients, relative to their mean.
        """
        known = [found.token_gradients for found in map(self._sensitivities, layers) if found is not None]
        gradients = [found.float() for found in known if found is not None]
        if not gradients:
            return None
        total = torch.stack(gradients).sum(dim=0)
        weights = total**self._power
        if self._measured:
            if len(total) != self._measured:
                return None  # the layer does not read one row for each token
            weights = torch.cat([self._predicted(total, weights), weights])
        return weights / weights.mean()

    def _predicted(
        self, gradients: Float[Tensor, " measured"], weights: Float[Tensor, " measured"]
    ) -> Float[Tensor, " others"]:
        """Return the weights of the tokens that have not been differentiated."""
        mean, centred, factor = self._regression
        logarithms = (gradients / gradients.mean()).clamp_min(_LEAST).log().to(centred)
        slope = torch.cholesky_solve((centred.T @ (logarithms - logarithms.mean()))[:, None], factor)[:, 0]
        fitted = torch.cat([_product(batch, slope) for batch in self._hidden]).sub_(mean @ slope).mul_(self._power)
        # No more than the largest of those that the prediction is fitted to.
        fitted = fitted.clamp_max_(fitted[-self._measured :].max()).exp_().cpu()
        return fitted[: -self._measured] * (weights.mean() / fitted[-self._measured :].mean())

    @cached_property
    def _regression(self) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and centred features of the measured tokens, and the Cholesky factor of their ridge regression."""
        last: list[Tensor] = []
        for batch in reversed(self._hidden):
            last.insert(0, _features(batch))
            if sum(map(len, last)) >= self._measured:
                break
        rows = torch.cat(last)[-self._measured :]
        mean = rows.mean(dim=0)
        rows -= mean
        normal = gram_matrix(rows).to(rows)
        normal.diagonal().mul_(1 + _RIDGE).add_(_LEAST)
        return mean, rows, torch.linalg.cholesky(normal)


def _features(batch: Float[Tensor, "windows tokens width"]) -> Float[Tensor, "rows features"]:
    """Return the features of tokens: four of the place in the window, then norm and direction of the state."""
    states, norms = _states(batch)
    directions = states / norms * states.shape[1] ** 0.5
    return torch.cat([_places(batch).repeat(len(batch), 1), norms.log(), directions], dim=1)


def _product(batch: Float[Tensor, "windows tokens width"], slope: Float[Tensor, " features"]) -> Float[Tensor, " rows"]:
    """Return the product of the features with a vector, without computing them."""
    states, norms = _states(batch)
    place, norm, direction = slope[:4], slope[4], slope[5:]
    directions = states @ direction / norms[:, 0] * states.shape[1] ** 0.5
    product: Tensor = (_places(batch) @ place).repeat(len(batch)) + norms[:, 0].log() * norm + directions
    return product


def _states(batch: Float[Tensor, "windows tokens width"]) -> tuple[Tensor, Float[Tensor, "rows 1"]]:
    states = batch.flatten(0, 1).float()
    return states, torch.linalg.vector_norm(states, dim=1, keepdim=True).clamp_min(1e-30)


def _places(batch: Float[Tensor, "windows tokens width"]) -> Float[Tensor, "tokens 4"]:
    length = batch.shape[1]
    places = torch.arange(length, device=batch.device)
    return torch.stack([places == 0, places == length - 1, places.log1p(), places.flip(0).log1p()], dim=1).float()
