"""Quantized layers whose codes are learnt."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int8, Int64
from torch import Tensor, nn
from torch.nn import functional

from rocket_core.layers.code_stream import coded_bytes
from rocket_core.linalg.entropy_rounding import code_lengths
from rocket_core.linalg.integer_codes import RoundedWeight
from rocket_core.linalg.kernels.rate import LARGEST_CODE

# Positions start at most this far from their code, in steps.
_REACH = 0.35
# Codes are shortened until the bytes are right to this part of the codes that can be.
_PRECISION = 1 / 500


class LearntCodes(nn.Module):
    """A linear layer with the weight `code · scale`, whose scales are fixed and whose codes can change.

    Every code is the rounded position of a number that is trained, in units of its scale. In the forward pass of
    training, codes are rounded; backward, gradients pass the rounding unchanged. Positions begin at the dense weight
    where this rounds to the code, and otherwise near the border to it, so that codes that were a close decision change
    first.

    Args:
        rounded: the codes to start from.
        dense: the weight that was rounded.
        bias: the layer's bias.

    Attributes:
        position: positions by output, then input.
        bias: the layer's bias.
        shortened: codes that are one less in magnitude than the rounded position, because they take fewer bits.
        coded_bytes_before: bytes of entropy-coded codes at first; 0 if codes have a fixed length.

    References:
        Bengio et al., "Estimating or propagating gradients through stochastic neurons", 2013.
        Cheng et al., "Optimize weight rounding via signed gradient descent for the quantization of LLMs", 2024.
    """

    scales: Tensor

    def __init__(self, rounded: RoundedWeight, dense: Float[Tensor, "d_out d_in"], bias: nn.Parameter | None) -> None:
        super().__init__()
        self._start = rounded
        codes = rounded.codes.T.float()
        scales = rounded.scales.by_input(len(rounded.codes), torch.float32).T.contiguous()
        self.register_buffer("scales", scales, persistent=False)
        self.position = nn.Parameter((dense.float() / scales).clamp(codes - _REACH, codes + _REACH))
        self.bias = bias
        self.shortened: Bool[Tensor, "d_out d_in"] | None = None
        half = 2 ** (rounded.scales.format.bits - 1)
        self._range = (-LARGEST_CODE, LARGEST_CODE) if rounded.entropy_coded else (-half, half - 1)
        self.coded_bytes_before = coded_bytes(rounded.codes) if rounded.entropy_coded else 0

    @property
    def entropy_coded(self) -> bool:
        """Whether the bytes of the layer depend on its codes."""
        return self._start.entropy_coded

    def codes(self) -> Float[Tensor, "d_out d_in"]:
        """Return the codes, which are integers."""
        nearest = self.position.detach().round().clamp_(*self._range)
        return nearest if self.shortened is None else nearest - nearest.sign() * self.shortened

    @property
    def weight(self) -> Float[Tensor, "d_out d_in"]:
        """The weight of the current codes, whose gradient is passed on to their positions."""
        codes = self.position + (self.codes() - self.position).detach()
        return codes * self.scales

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (callers of nn.Linear may name it)
        """Multiply with the weight of the current codes."""
        return functional.linear(input, self.weight, self.bias)

    def bits(self) -> Float[Tensor, ""]:
        """Return the ideal bits of all codes, given how often each occurs.

        The gradient with respect to a position is the difference between the bits of the codes around it.
        """
        codes = self.codes()
        lengths = code_lengths(codes).to(codes)
        below = self.position.detach().floor().clamp_(-LARGEST_CODE, LARGEST_CODE - 1).long() + LARGEST_CODE
        slope = lengths[below + 1] - lengths[below]
        bits = lengths[codes.long() + LARGEST_CODE].sum()
        return bits + (slope * (self.position - self.position.detach())).sum()

    @torch.no_grad()
    def distances(self) -> Float[Tensor, "d_out d_in"]:
        """Return how far each position is from where its code would be shorter; infinite where it is another way."""
        nearest = self.position.round().clamp_(*self._range)
        towards_zero = (nearest - self.position) * nearest.sign()
        return torch.where(towards_zero > 0, 0.5 - towards_zero, torch.inf)

    def coded_bytes(self) -> int:
        """Return the bytes of the current codes if they are entropy coded, else 0."""
        return coded_bytes(self._stored_codes()) if self.entropy_coded else 0

    @torch.no_grad()
    def rounded(self) -> RoundedWeight:
        """Return the weight with the current codes."""
        return RoundedWeight(
            codes=self._stored_codes(), scales=self._start.scales, entropy_coded=self._start.entropy_coded
        )

    def _stored_codes(self) -> Int8[Tensor, "d_in d_out"]:
        return self.codes().to(torch.int8).T.contiguous()


def shorten(layers: Sequence[LearntCodes]) -> None:
    """Shorten as few codes as needed for the entropy-coded layers to take no more bytes together than at first.

    Those whose positions are nearest to a shorter code are first. Positions that are trained for long are close to the
    borders between codes; many of them at once would be a large change.
    """
    coded = [layer for layer in layers if layer.entropy_coded]
    most = sum(layer.coded_bytes_before for layer in coded)
    for layer in coded:
        layer.shortened = None
    if sum(layer.coded_bytes() for layer in coded) <= most:
        return
    distances = [layer.distances() for layer in coded]
    together = torch.cat([part.flatten() for part in distances])
    order = together.argsort(stable=True)
    low, high = 0, int(torch.isfinite(together).sum())
    step = max(1, int(high * _PRECISION))
    while high - low > step:
        middle = (low + high) // 2
        _shorten_first(coded, distances, order[:middle])
        fits = sum(layer.coded_bytes() for layer in coded) <= most
        low, high = (low, middle) if fits else (middle, high)
    _shorten_first(coded, distances, order[:high])


def _shorten_first(layers: Sequence[LearntCodes], like: Sequence[Tensor], places: Int64[Tensor, " n"]) -> None:
    chosen = torch.zeros(sum(part.numel() for part in like), dtype=torch.bool, device=places.device)
    chosen[places] = True
    for layer, part, own in zip(layers, like, torch.split(chosen, [part.numel() for part in like]), strict=True):
        layer.shortened = own.view_as(part)
