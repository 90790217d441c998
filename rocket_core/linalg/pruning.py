"""Unstructured pruning: most entries of a weight become zero, the rest get their least-squares values.

Pure functions of tensors. A pruned layer stores its nonzero entries and one bit per entry; it has no dictionary.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rocket_core.linalg.least_squares import UnitGram, descend, inner_product, largest
from rocket_core.linalg.rough_products import multiply_roughly, rough_factor, rough_products

# Allowed excess of the error over the minimum on a support, relative to the minimum. Intermediate steps need no high
# accuracy, as they only score which entries to remove next, and the bound is loose: most errors are within a hundredth.
_ON_THE_WAY = 0.1
_AT_THE_END = 1e-4
# Intermediate numbers of entries, as fractions of the way on a logarithmic scale. The first removals hardly matter, the
# last ones do.
_APPROACH = (0.4, 0.65, 0.8, 0.9, 0.96, 1.0)
# Iterations that choose a new support, and then iterations that only refit its values. On layers of a sentence encoder
# errors are 0.3 % less with six more choices and 0.6 % more with six fewer; 0.1 % less with six more refits and 1.1 %
# more with two.
_CHOICES = 18
_REFITS = 6
# How far iterations that refit go beyond X, except for the last one, which takes a third to a half fewer of them. On
# layers of SmolLM2-135M and of `benchmarks.scale`, the squared errors of paths fall by 1 % on average and 10 % at most.
_RELAXATION = 1.8
# Mean eigenvalue below which splitting converges too slowly. Layers of a sentence encoder have 0.2 to 0.6.
_LEAST_MEAN = 0.03
# Mean eigenvalue below which splitting ends before its values are the least-squares solution on the support.
_LEAST_REFITTED_MEAN = 0.15
_AFTER_SPLITTING = 1e-2
# In wide layers, steps of conjugate gradients take hours, and more iterations of splitting seconds. Their number: on
# layers of 576 to 3072 inputs with means of 0.013 to 0.13, the squared error ends within 1 % of its minimum on the
# support. Below the least mean nothing was measured.
_WIDE_LEAST_MEAN, _WIDE_REFITS, _MOST_WIDE_REFITS = 0.01, 1.35, 60
# The pull is a power of the mean eigenvalue, which falls by so much for each unit of the ratio above a first one.
_SPARSE_FROM, _SPARSE_POWER = 0.65, 1.5
# Iterations for each number of entries of a path. On layers of SmolLM2-135M errors are 1 to 4 % above those of `prune`,
# with 10 and 3 1 to 2 %; its KL at a ratio of 0.3 is the same with 6 and 2 as with these (0.0724 and 0.0723).
_PATH_CHOICES, _PATH_REFITS = 7, 4
# Inputs from which on a layer is wide, and rough products suffice: in small layers single entries matter. On layers
# with the shapes of a language model of 1 B parameters errors change by 3e-4 at most.
_WIDE_FROM = 512
# Scores that tell well enough which are the largest of all, except for the last choice of a support.
_ORDERED = 2**18
# Numbers of entries with the same pull, as its inverse costs n³.
_COUNTS_PER_PULL = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class PrunedWeight:
    """A sparse weight.

    Attributes:
        weight: W̃, zero outside the support.
        support: which entries are kept.
        errors: ‖S(w_j - w̃_j)‖² of each output j, in float64.
    """

    weight: Float[Tensor, "d_in d_out"]
    support: Bool[Tensor, "d_in d_out"]
    errors: Float[Tensor, " d_out"]

    @property
    def error(self) -> float:
        """‖S(W - W̃)‖²."""
        return float(self.errors.sum())

    @property
    def nnz(self) -> int:
        """Number of entries kept."""
        return int(self.support.sum())


def split_path(weight: Float[Tensor, "d_in d_out"], unit: UnitGram, counts: Sequence[int]) -> Iterator[PrunedWeight]:
    """Prune a weight to fewer and fewer entries by splitting, each time starting from the result before.

    Takes 12 products with a matrix for each count, and n³ for every fourth.

    Args:
        weight: W.
        unit: G, positive definite, in the dtype to compute in.
        counts: entries to keep at each step, decreasing, 1 to `weight.numel()`.

    Yields:
        The pruned weight for each count, in the dtype and on the device of `unit`.
    """
    mean = max(unit.mean_eigenvalue, _LEAST_MEAN)
    splitting, pull = _Splitting(weight, unit), 0.0
    for number, count in enumerate(counts):
        if number % _COUNTS_PER_PULL == 0:
            together = counts[number : number + _COUNTS_PER_PULL]
            before, pull = pull, _pull(mean, 1 - sum(together) / (len(together) * weight.numel()))
            half = _half_reflection(unit, pull)
            if before:
                splitting.rescale(before / pull)
        splitting.choose(half, count, choices=_PATH_CHOICES, refits=_PATH_REFITS)
        yield splitting.pruned()


def prune(weight: Float[Tensor, "d_in d_out"], unit: UnitGram, count: int) -> PrunedWeight:
    """Prune a weight to a number of entries, optimising support and values jointly.

    Minimises ‖S(W - W̃)‖² over W̃ with `count` nonzeros by splitting: a dense X, near the minimiser, and a sparse Z,
    which takes the largest entries of X plus what was cut before, are pulled towards each other until they agree. In
    the last iterations the support is fixed, and the same iteration converges to the minimiser on it. This takes 18 and
    6 products with a matrix; steps of `prune_path` with decreasing length take 70 to 150. On layers of a sentence
    encoder the output error is 0 to 4 % less than with these steps (at most 0.5 % more if almost nothing is pruned),
    and within 1 % of the minimum on its support.

    The iteration converges slowly if a few directions hold most of the inputs' energy. Then wide layers take up to 60
    iterations in the end; others such steps instead, and the squared error is within 1e-4 of its minimum on the
    support. On layers of a sentence encoder six of them leave less error than steps of a twentieth of the layer, by 8 %
    at 0.8 of the entries and by 3 % at half and at a fifth of them. On random layers of 1024 inputs with means of 0.013
    to 0.027, splitting leaves up to 4 % less error than steps at 0.7 and half of the entries, and up to 3 % more at a
    fifth.

    Args:
        weight: W.
        unit: G, positive definite, in the dtype to compute in.
        count: entries to keep, 1 to `weight.numel()`.

    Returns:
        The pruned weight, in the dtype and on the device of `unit`.

    References:
        Boyd et al., "Distributed optimization and statistical learning via the alternating direction method of
        multipliers", 2011, section 9.1; Boža, "Fast and effective weight update for pruned large language models",
        2024.
    """
    size = weight.numel()
    mean = unit.mean_eigenvalue
    wide = len(weight) >= _WIDE_FROM
    if mean >= (_WIDE_LEAST_MEAN if wide else _LEAST_MEAN):
        splitting, converges = _Splitting(weight, unit), mean >= _LEAST_REFITTED_MEAN
        refits = min(_MOST_WIDE_REFITS, round(_WIDE_REFITS / mean)) if wide and not converges else _REFITS
        half = _half_reflection(unit, _pull(mean, 1 - count / size))
        splitting.choose(half, count, choices=_CHOICES, refits=refits)
        return splitting.pruned() if wide or converges else splitting.refitted(_AFTER_SPLITTING)
    way = sorted({round(size * (count / size) ** part) for part in _APPROACH}, reverse=True)
    steps = [(stop, _ON_THE_WAY) for stop in way[:-1]] + [(count, _AT_THE_END)]
    [pruned] = deque(prune_path(weight, unit, steps), maxlen=1)
    return pruned


def _pull(mean: float, ratio: float) -> float:
    """Return the strength of the pull between X and Z; a heuristic.

    Too weak a pull increases errors by a fifth, too strong a pull by some hundredths, which more choices do not fix. In
    between the error has a flat minimum, which is here on layers of a sentence encoder, on random ones, and on those of
    `benchmarks.scale`. Few entries of correlated inputs are hardly correlated, which takes a stronger pull.

    Args:
        mean: mean eigenvalue of the Gram matrix.
        ratio: part of the entries to remove.
    """
    power: float = 1 - _SPARSE_POWER * max(0.0, ratio - _SPARSE_FROM)
    return math.pow(mean, power) * (0.7 + 0.75 * ratio)


def _half_reflection(unit: UnitGram, pull: float) -> Float[Tensor, "n n"]:
    """Return p(G + pI)⁻¹ - I/2."""
    matrix = unit.resolvent(pull)
    matrix.diagonal().sub_(0.5)
    return matrix


class _Splitting:
    """The two parts that a weight is split into.

    With T the weight and U what Z has cut: X = T + p(G + pI)⁻¹(Z - U - T), and X + U is split into Z and the next U.
    With a relaxation r, X is replaced by rX + (1 - r)Z. As the nonzeros of Z and U never overlap, Z - U is their sum B
    with signs, and the next sum is (1 - r/2)B + (r/2)T - r(p(G + pI)⁻¹ - I/2)(T - Z + U): three operations.
    """

    def __init__(self, weight: Float[Tensor, "d_in d_out"], unit: UnitGram) -> None:
        self._unit = unit
        self._target = _target(weight, unit)
        self._both = self._target.clone()  # Z + U
        self._signs = torch.empty_like(self._target)  # 1 where Z may be nonzero, else -1
        self._scratch = torch.empty_like(self._target)
        self._started = False

    def choose(self, half_reflection: Float[Tensor, "n n"], count: int, *, choices: int, refits: int) -> None:
        """Choose a support of some entries and then refit its values, starting from what was chosen before.

        Args:
            half_reflection: p(G + pI)⁻¹ - I/2.
            count: entries to keep.
            choices: iterations that choose a new support.
            refits: iterations that only refit its values.
        """
        wide = len(half_reflection) >= _WIDE_FROM
        factor = rough_factor(half_reflection) if wide else half_reflection
        one, minus = self._signs.new_tensor([1.0, -1.0])
        last = choices + refits - 1
        for turn in range(last + 1):
            if self._started:
                with rough_products(factor.device) if wide else nullcontext():
                    self._step(factor, _RELAXATION if choices <= turn < last else 1.0)
            self._started = True
            if turn < choices:
                scores = torch.square(self._both, out=self._scratch)
                if not self._unit.all_fire:
                    scores.mul_(self._unit.fires)
                exactly = turn + 1 == choices or scores.numel() <= 2 * _ORDERED
                kept = largest(scores, count) if exactly else _about_largest(scores, count)
                torch.where(kept, one, minus, out=self._signs)

    def rescale(self, factor: float) -> None:
        """Multiply U by the old pull over a new one, which keeps the force that it stands for."""
        self._both.mul_(torch.where(self._support(), 1.0, factor))

    def pruned(self) -> PrunedWeight:
        """Return Z."""
        support = self._support()
        solution = self._both * support
        torch.sub(self._target, solution, out=self._scratch)
        products = self._scratch @ self._unit.matrix
        return _pruned(self._unit, solution, support, self._scratch, products)

    def refitted(self, tolerance: float) -> PrunedWeight:
        """Return Z after conjugate gradients on its support, up to a relative excess of the squared error."""
        support = self._support()
        solution = self._both * support
        residual = (self._target - solution) @ self._unit.matrix
        energy = inner_product(self._target, self._target @ self._unit.matrix)
        error = inner_product(self._target - solution, residual)
        floor = torch.finfo(residual.dtype).eps * energy
        kept = support.to(residual.dtype)
        descend(self._unit, solution, residual, kept, error=error, floor=floor, tolerance=tolerance)
        return _pruned(self._unit, solution, support, self._target - solution, residual)

    def _support(self) -> Bool[Tensor, "d_out d_in"]:
        return self._signs > 0

    def _step(self, factor: Float[Tensor, "n n"], relaxation: float) -> None:
        torch.addcmul(self._target, self._both, self._signs, value=-1, out=self._scratch)
        self._both.lerp_(self._target, relaxation / 2)
        if factor.dtype == self._both.dtype:
            self._both.addmm_(self._scratch, factor, alpha=-relaxation)
        else:
            self._both.sub_(multiply_roughly(self._scratch, factor), alpha=relaxation)


def _about_largest(scores: Float[Tensor, "rows columns"], count: int) -> Bool[Tensor, "rows columns"]:
    """Return a mask of about the `count` largest scores: those above what is largest in a sample."""
    stride = scores.numel() // _ORDERED
    while math.gcd(stride, scores.shape[1]) > 1:  # the sample is of all columns
        stride += 1
    sample = scores.flatten()[::stride]
    place = min(len(sample) - 1, len(sample) * (scores.numel() - count) // scores.numel())
    if sample.device.type == "cpu":
        return scores >= float(np.partition(sample.numpy(), place)[place])
    return scores >= sample.sort().values[place]


def _target(weight: Float[Tensor, "d_in d_out"], unit: UnitGram) -> Float[Tensor, "d_out d_in"]:
    """Return the weight with outputs as rows, for inputs scaled to unit length."""
    return (weight.to(unit.matrix.dtype).mT * unit.lengths).contiguous()


def _pruned(
    unit: UnitGram,
    solution: Float[Tensor, "d_out d_in"],
    support: Bool[Tensor, "d_out d_in"],
    removed: Float[Tensor, "d_out d_in"],
    products: Float[Tensor, "d_out d_in"],
) -> PrunedWeight:
    """Return the result in the weight's original scale, given what is removed and its product with G.

    Errors are computed from the difference, not from energies, most digits of which cancel if little is pruned.
    """
    return PrunedWeight(
        weight=(solution / unit.lengths).mT.contiguous(),
        support=support.mT.contiguous(),
        errors=(removed * products).sum(dim=1, dtype=torch.float64).clamp_min_(0),
    )


def prune_path(
    weight: Float[Tensor, "d_in d_out"], unit: UnitGram, steps: Sequence[tuple[int, float]]
) -> Iterator[PrunedWeight]:
    """Prune a weight step by step to fewer and fewer entries.

    Each step removes the entries with the smallest w̃² · G_ii, where w̃ are the values refitted after the previous step,
    and refits the rest, approximately to the minimiser of ‖S(W - W̃)‖² on its support. Scoring refitted values is the
    difference to pruning once by |w| · ‖x‖ (Wanda) with a refit at the end, which on layers of a sentence encoder has a
    quarter to a half more error at half of the entries.

    Columns may be weighted by scaling W's columns beforehand.

    Args:
        weight: W.
        unit: G, positive definite, in the dtype to compute in.
        steps: entries to keep at each step, decreasing, 1 to `weight.numel()`, and the allowed excess of the error over
            the minimum on the support, relative to the minimum.

    Yields:
        The pruned weight for each step, in the dtype and on the device of `unit`. Each step starts from the previous
        one, so a result depends on all steps before it.

    References:
        Hassibi and Stork, "Optimal brain surgeon", 1993; Sun et al., "Wanda", 2023.
    """
    target = _target(weight, unit)
    floor = torch.finfo(target.dtype).eps * inner_product(target, target @ unit.matrix)
    solution = target.clone()
    residual = torch.zeros_like(target)
    support = torch.ones_like(target, dtype=torch.bool)
    for count, tolerance in steps:
        support = largest((solution.square() * unit.fires).masked_fill_(~support, -1), count)
        kept = support.to(target.dtype)
        solution *= kept
        # Recomputed, as summing the changes of all steps would accumulate rounding errors.
        torch.mm(target - solution, unit.matrix, out=residual)
        error = inner_product(target - solution, residual)
        descend(unit, solution, residual, kept, error=error, floor=floor, tolerance=tolerance)
        yield _pruned(unit, solution, support, target - solution, residual)


def prune_at_once(
    weight: Float[Tensor, "d_in d_out"],
    input_energy: Float[Tensor, " d_in"] | None,
    count: int,
    *,
    per_column: bool,
) -> Bool[Tensor, "d_in d_out"]:
    """Choose entries by magnitude, or by magnitude times the norm of their input, without changing their values.

    Args:
        weight: W.
        input_energy: diagonal of G; None scores by magnitude alone.
        count: entries to keep, 1 to `weight.numel()`.
        per_column: keep equally many in every column, as Wanda does (the first columns keep one more if `count` is not
            divisible); else compare all entries of the matrix.

    Returns:
        The support.

    References:
        Han et al., "Learning both weights and connections", 2015; Sun et al., "Wanda", 2023.
    """
    scores = weight.square() if input_energy is None else weight.square() * input_energy[:, None]
    if not per_column:
        return largest(scores, count)
    d_out = weight.shape[1]
    share, rest = divmod(count, d_out)
    order = scores.argsort(dim=0, descending=True, stable=True)
    kept = torch.arange(weight.shape[0], device=weight.device)[:, None] < share + (
        torch.arange(d_out, device=weight.device) < rest
    )
    return torch.zeros_like(kept).scatter(0, order, kept)
