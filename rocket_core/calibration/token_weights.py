"""How much each calibration token counts, by the gradients of the loss."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from rocket_core.calibration.sensitivity import Sensitivity

# The power of the squared gradients of a token in its weight: that of the least KL on SmolLM2-135M at 4 bits.
_POWER = 0.75
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
    """

    def __init__(
        self,
        sensitivities: Callable[[str], Sensitivity | None],
        hidden: Sequence[Float[Tensor, "windows tokens width"]],
        measured: int,
    ) -> None:
        self._sensitivities = sensitivities
        self._hidden = hidden
        self._measured = measured

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
        weights = total**_POWER
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
        fitted = torch.cat([(rows - mean) @ slope for rows in self._features()]).mul_(_POWER)
        # No more than the largest of those that the prediction is fitted to.
        fitted = fitted.clamp_max_(fitted[-self._measured :].max()).exp_().cpu()
        return fitted[: -self._measured] * (weights.mean() / fitted[-self._measured :].mean())

    @cached_property
    def _regression(self) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and centred features of the measured tokens, and the Cholesky factor of their ridge regression."""
        rows = torch.cat(list(self._features()))[-self._measured :]
        mean = rows.mean(dim=0)
        rows -= mean
        normal = rows.T @ rows
        normal.diagonal().mul_(1 + _RIDGE).add_(_LEAST)
        return mean, rows, torch.linalg.cholesky(normal)

    def _features(self) -> Iterator[Float[Tensor, "rows features"]]:
        """Yield the features of the tokens of each batch: place in the window, norm and direction of the state."""
        for batch in self._hidden:
            windows, length, width = batch.shape
            places = torch.arange(length, device=batch.device)
            place = torch.stack([places == 0, places == length - 1, places.log1p(), places.flip(0).log1p()], dim=1)
            states = batch.reshape(-1, width).float()
            norms = torch.linalg.vector_norm(states, dim=1, keepdim=True).clamp_min(1e-30)
            directions = states / norms * width**0.5
            yield torch.cat([place.float().repeat(windows, 1), norms.log(), directions], dim=1)
