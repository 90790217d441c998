"""Entropy-coded candidates: integer codes on one step per output, in as many bits as their distribution needs.

A candidate is a number of bytes. Its step is found when the layer is compressed: the smallest with which the coded
layer has at most that many.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from rocket_core.candidates import Candidate
from rocket_core.layers.code_stream import byte_counts, bytes_from_counts, encode_codes, expected_bytes
from rocket_core.linalg.entropy_rounding import (
    RateTarget,
    StepScales,
    entropy_bits,
    improve_for_rate,
    relative_steps,
    round_each,
    round_for_rate,
)
from rocket_core.linalg.integer_codes import RoundedWeight, Scales
from rocket_core.linalg.kernels.rate import LARGEST_CODE
from rocket_core.linalg.rounding import RoundingGram
from rocket_core.methods.layer_problem import CompressedLayer, LayerProblem
from rocket_core.methods.sampled_outputs import SampledOutputs, output_importance
from rocket_core.sizes.code_format import coded_format, fewest_coded_bytes

# Candidates at the highest rate; with more bits, codes of 8 bits with groups are better.
_MOST_BITS = 6.5
# Steps of candidates per octave; each octave is about a bit per weight.
_PER_OCTAVE = 2
# More than are needed until all codes are zero, as each octave takes about a bit and codes have at most 8.
_MOST_CANDIDATES = 64
# As many as there are at 3 bits and more; the search for those with fewer bits ends after each.
_READ_TOGETHER = 8
# Bytes that a layer may leave of a candidate's, as a part of them.
_SLACK = 0.002
_SWEEPS = 2
# The search starts with roundings without sweeps, until their bytes are near the aim.
_ROUGHLY = 0.01
_ROUGH_TRIES = 3
# Part of its bytes that a layer then loses: by sweeps, and as streams are shorter than expected. With it 22 of 30
# layers of SmolLM2-135M at 2.5 and 4 bits have the bytes asked for after one try with sweeps, without it 8.
_LOST = 0.0012
_TRIES = 6
_ENTROPY_TRIES = 4
# Where every entry is rounded by itself: outputs, at least, on which the search starts, and bytes of a stream above the
# entropy of its codes, as a part of that.
_SEARCHED_OUTPUTS = 64
_ABOVE_ENTROPY = 0.005
# What a layer may leave then, as a part of its bytes; those after it in the block get it.
_PLAIN_SLACK = 0.01


def profile(problem: LayerProblem, sample: SampledOutputs) -> list[Candidate]:
    """Return candidates at steps of half an octave, by falling bytes, down to `fewest_coded_bytes`.

    Errors are those of one pass over a sample of the outputs.

    Args:
        problem: the layer.
        sample: its outputs, or some of them.
    """
    d_in, d_out = problem.shape
    fewest, scale_bytes = fewest_coded_bytes(d_in, d_out), coded_format(d_in).scale_bytes(d_in, d_out)
    candidates: list[Candidate] = []
    for error, distance, part_bytes, are_zero in _measured(problem, sample):
        size = math.ceil(part_bytes * d_out / len(sample.outputs)) + scale_bytes
        candidates.append(
            Candidate(
                kind="entropy_coded",
                kept_parameters=d_in * d_out,
                stored_bytes=max(size, fewest),
                **sample.errors_from([error, distance]),
            )
        )
        if size <= fewest or are_zero:
            break
    return [candidate for candidate in candidates if candidate.stored_bytes < d_in * d_out]


def _measured(problem: LayerProblem, sample: SampledOutputs) -> Iterator[tuple[float, float, float, bool]]:
    """Yield for longer and longer steps the errors of `SampledOutputs.squares_of`, bytes, and if all codes are zero."""
    steps = _relative_steps(problem, sample.importance)
    first = math.ceil(_PER_OCTAVE * _octaves_for(sample.weight / steps, _MOST_BITS))
    scales, half_octaves = StepScales.of(sample.weight, steps), iter(range(first, first + _MOST_CANDIDATES))
    number, at_once = sample.weight.numel(), _READ_TOGETHER
    # A GPU is waited for once for all candidates that there surely are, and then for each.
    while together := list(itertools.islice(half_octaves, at_once)):
        at_once = 1
        multiples = [2 ** (half_octave / _PER_OCTAVE) for half_octave in together]
        if problem.is_uncalibrated:
            for error, distance, bits in torch.stack([_plain(sample, scales.at(c)) for c in multiples]).tolist():
                yield error, distance, bits * (1 + _ABOVE_ENTROPY) * number / 8, bits == 0
            continue
        for error, distance, *found in torch.stack([_for_rate(sample, scales, c) for c in multiples]).tolist():
            counts = [int(count) for count in found]
            yield error, distance, bytes_from_counts(counts), counts[0] == number


def _plain(sample: SampledOutputs, scales: Scales) -> Float64[Tensor, "3"]:
    """Round every entry by itself, and return the errors and the bits of a code."""
    rounded = round_each(sample.weight, scales)
    squares = sample.squares_of(rounded, None)
    return torch.cat([squares, entropy_bits(rounded.codes)[None].to(squares)])


def _for_rate(sample: SampledOutputs, scales: StepScales, c: float) -> Float64[Tensor, " numbers"]:
    """Round for error and bits, and return the errors and how often each byte occurs."""
    rounded, errors = round_for_rate(sample.weight, sample.gram, RateTarget.of(scales, sample.importance, c))
    squares = sample.squares_of(rounded, errors)
    return torch.cat([squares, byte_counts(rounded.codes.T.reshape(-1)).to(squares)])


def compress(problem: LayerProblem, most_bytes: int) -> CompressedLayer:
    """Round the weight so that its coded form has at most a number of bytes, and hardly less.

    Args:
        problem: the layer.
        most_bytes: bytes of codes and scales.
    """
    weight = problem.weight.to(problem.precision)
    importance = output_importance(problem)
    most_bytes -= coded_format(len(weight)).scale_bytes(*problem.shape)
    steps = _relative_steps(problem, importance)
    if problem.is_uncalibrated:
        rounded = _PlainSearch(weight, steps, most_bytes).best()
        errors = problem.unweighted_errors(weight - rounded.weight(weight.dtype))
    else:
        gram = problem.prepared_gram().rounding
        rounded, damped = _Search(weight, steps, most_bytes, gram, importance).best()
        errors = gram.undamped(damped, weight - rounded.weight(weight.dtype))
    return CompressedLayer(factors=rounded, errors=errors * importance)


def _relative_steps(problem: LayerProblem, importance: Float[Tensor, " outputs"]) -> Float[Tensor, " outputs"]:
    """Return the step of each output for c = 1, see `relative_steps`."""
    if problem.is_uncalibrated:
        return importance.rsqrt().to(problem.precision)
    return relative_steps(problem.prepared_gram().rounding, importance)


class _Search:
    """Search for the multiple c of the relative steps at which a layer takes the given bytes.

    Args:
        weight: W.
        steps: the relative steps.
        most_bytes: upper bound on the bytes of the codes.
        gram: prepared Gram matrix.
        importance: weight of each output's squared error.
    """

    def __init__(
        self,
        weight: Float[Tensor, "d_in d_out"],
        steps: Float[Tensor, " d_out"],
        most_bytes: int,
        gram: RoundingGram,
        importance: Float[Tensor, " d_out"],
    ) -> None:
        self._weight, self._gram, self._importance = weight, gram, importance
        self._scales = StepScales.of(weight, steps)
        self._most = most_bytes
        self._aim = most_bytes * (1 - _SLACK / 2)

    def best(self) -> tuple[RoundedWeight, Float[Tensor, " d_out"]]:
        """Return the rounding with the most bytes within the bound, of those that were tried, and its damped errors."""
        octaves = _octaves_for(self._weight / self._scales.steps, 8 * self._aim / self._weight.numel())
        codes = round_each(self._weight, self._scales.at(2**octaves)).codes
        aim = self._aim * (1 + _LOST)
        root = self._root(aim)
        for _ in range(_ROUGH_TRIES):
            codes = self._round(octaves, codes)[0].codes
            size = expected_bytes(codes)
            octaves = root.after(octaves, size)
            if abs(size - aim) < _ROUGHLY * aim:
                break
        root = self._root(self._aim)
        most, best = -1, None
        for tries in itertools.count():
            if best is not None and (tries >= _TRIES or most >= self._most * (1 - _SLACK)):
                return best
            rounded, target = self._round(octaves, codes)
            rounded, errors = improve_for_rate(self._weight, self._gram, rounded, target.worth, sweeps=_SWEEPS)
            codes = rounded.codes
            stream = encode_codes(codes.T.reshape(-1))
            size = len(stream)
            if most < size <= self._most:
                most, best = size, (replace(rounded, stream=stream), errors)
            octaves = root.after(octaves, size)
        raise AssertionError

    def _root(self, aim: float) -> "_Root":
        return _Root(aim, self._weight.numel() / 8)

    def _round(self, octaves: float, codes: Tensor) -> tuple[RoundedWeight, RateTarget]:
        """Return the rounding for c = 2^octaves without sweeps, given similar codes, and what it was made for."""
        target = RateTarget.of(self._scales, self._importance, 2**octaves, like=codes)
        return round_for_rate(self._weight, self._gram, target)[0], target


class _PlainSearch:
    """The same search where every entry is rounded by itself.

    Args:
        weight: W.
        steps: the relative steps.
        most_bytes: upper bound on the bytes of the codes.
    """

    def __init__(self, weight: Float[Tensor, "d_in d_out"], steps: Float[Tensor, " d_out"], most_bytes: int) -> None:
        self._weight, self._scales, self._most = weight, StepScales.of(weight, steps), most_bytes

    def best(self) -> RoundedWeight:
        """Return the rounding with the most bytes within the bound, of those that were tried."""
        aim = self._most * (1 - _SLACK)
        octaves, root = self._about(aim), _Root(aim, self._weight.numel() / 8)
        most, best = -1, None
        for tries in itertools.count():
            if best is not None and (tries >= _TRIES or most >= self._most * (1 - _PLAIN_SLACK)):
                return best
            rounded = round_each(self._weight, self._scales.at(2**octaves))
            stream = encode_codes(rounded.codes.T.reshape(-1))
            size = len(stream)
            if most < size <= self._most:
                most, best = size, replace(rounded, stream=stream)
            octaves = root.after(octaves, size)
        raise AssertionError

    def _about(self, aim: float) -> float:
        """Return the octaves at which some of the outputs have their part of the bytes."""
        every = max(1, self._weight.shape[1] // _SEARCHED_OUTPUTS)
        parts = self._weight[:, ::every] / self._scales.steps[::every]
        return _octaves_for(parts, 8 * aim / (1 + _ABOVE_ENTROPY) / self._weight.numel())


class _Root:
    """Search for the octaves at which bytes, which fall with them, have a value.

    Args:
        aim: the value.
        slope: bytes by which an octave reduces them, about.
    """

    def __init__(self, aim: float, slope: float) -> None:
        self._aim, self._slope = aim, slope
        self._above: tuple[float, int] | None = None
        self._below: tuple[float, int] | None = None

    def after(self, octaves: float, size: int) -> float:
        """Return the octaves to try after some that gave a size."""
        if size > self._aim:
            self._above = octaves, size
        else:
            self._below = octaves, size
        if self._above is None or self._below is None or self._above[0] >= self._below[0]:
            return octaves + (size - self._aim) / self._slope
        (low, more), (high, less) = self._above, self._below
        return low + (high - low) * min(0.9, max(0.1, (more - self._aim) / (more - less)))


def _octaves_for(parts: Float[Tensor, "d_in d_out"], bits: float) -> float:
    """Return log2 c at which codes have the given entropy if every entry is rounded by itself."""
    octaves = parts.square().mean().sqrt().double().clamp_min(1e-30).log2() + 2 - bits
    for _ in range(_ENTROPY_TRIES):
        codes = (parts / torch.exp2(octaves)).round_().clamp_(-LARGEST_CODE, LARGEST_CODE).to(torch.int8)
        octaves = octaves + entropy_bits(codes) - bits
    return float(octaves)
