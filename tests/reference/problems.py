"""Layers to compress with their calibration tokens, and explicit errors of a compressed weight."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rocket_core.linalg.whitening import GramStatistics
from rocket_core.methods import LayerProblem

TOKENS = 60
SHRINKAGE = 0.05


@dataclass(kw_only=True)
class Example:
    """A problem and its inputs: those of the tokens, and the rows that shrinkage adds."""

    problem: LayerProblem
    inputs: Tensor

    def errors(self, approximation, part=slice(None)):
        """Return ‖S(W - W̃)diag(w)‖² and its relative root, ‖(W - W̃)diag(w)‖ / ‖W diag(w)‖, and the loss."""
        weights = self.problem.output_weights
        scale = torch.ones(approximation.shape[1], dtype=torch.float64) if weights is None else weights[part].double()
        weight = self.problem.weight[:, part].double()
        removed = (weight - approximation.double()) * scale
        error = float(torch.linalg.norm(self.inputs @ removed) ** 2)
        energy = float(torch.linalg.norm(self.inputs @ (weight * scale)) ** 2)
        relative = float(torch.linalg.norm(removed) / torch.linalg.norm(weight * scale))
        return error, (error / energy) ** 0.5, relative, None if weights is None else error / (2 * TOKENS)


def example(d_in, widths, *, seed=0, weights=None, output_gram=False, precision=torch.float64, spread=1.0):
    """Return a random problem.

    Args:
        weights: None, or how many powers of ten the column weights span.
        output_gram: use that instead of the input's.
    """
    generator = torch.Generator().manual_seed(seed)
    d_out = sum(widths)
    tokens = torch.randn(TOKENS, d_in, generator=generator, dtype=torch.float64)
    rotation = torch.linalg.qr(torch.randn(d_in, d_in, generator=generator, dtype=torch.float64)).Q
    tokens = tokens * torch.logspace(0, -spread, d_in, dtype=torch.float64) @ rotation
    weight = torch.randn(d_in, d_out, generator=generator, dtype=torch.float64)
    gram = tokens.T @ tokens
    pull = SHRINKAGE * d_in / TOKENS * gram.diagonal()
    statistics = GramStatistics(
        tokens=TOKENS,
        gram=None if output_gram else gram,
        output_gram=weight.T @ gram @ weight if output_gram else None,
        input_energy=gram.diagonal(),
    )
    columns = None
    if weights is not None:
        columns = 10 ** (weights * torch.rand(d_out, generator=generator, dtype=torch.float64) - weights / 2)
    problem = LayerProblem(
        weight=weight,
        statistics=statistics,
        shrinkage=SHRINKAGE,
        precision=precision,
        output_weights=columns,
        output_widths=tuple(widths),
    )
    return Example(problem=problem, inputs=torch.cat([tokens, torch.diag(pull.sqrt())]))
