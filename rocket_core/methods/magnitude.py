"""`magnitude`: zeroes the smallest weights of each layer, every layer at the same ratio."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rocket_core.candidates import Candidate
from rocket_core.linalg.pruning import prune_at_once
from rocket_core.methods import sparse
from rocket_core.methods.base import Method
from rocket_core.methods.layer_problem import CompressedLayer, LayerProblem, output_errors


class Magnitude(Method):
    """Pruning by |w|, without calibration and without a refit.

    References:
        Han et al., "Learning both weights and connections for efficient neural networks", 2015.
    """

    uniform = True

    @property
    def needs_input_gram(self) -> bool:
        """True, to measure the error; the choice of entries does not depend on it."""
        return True

    def profile(self, problem: LayerProblem) -> list[Candidate]:
        """Return one candidate, with as many entries as the ratio allows."""
        weight = problem.weight.to(problem.precision)
        gram = problem.gram()
        energy = float((weight * (gram @ weight)).sum(dtype=torch.float64))
        candidates = []
        for nnz in sparse.counts(*problem.shape, self.ratios, self.budget_itemsize):
            pruned, _ = self.pruned(problem, nnz)
            error = float(output_errors(gram, weight - pruned).sum())
            candidates.append(sparse.candidate(problem, weight, pruned, nnz, (error, energy), self.itemsize))
        return candidates

    def compress(self, problem: LayerProblem, candidate: Candidate) -> CompressedLayer:
        """Prune to as many entries as the candidate keeps."""
        assert candidate.nnz is not None
        pruned, support = self.pruned(problem, candidate.nnz)
        return sparse.stored(problem, problem.weight.to(problem.precision), pruned, support)

    def pruned(self, problem: LayerProblem, nnz: int) -> tuple[Float[Tensor, "d_in d_out"], Bool[Tensor, "d_in d_out"]]:
        """Return the weight with all other entries set to zero, and which entries are kept."""
        support = self.support(problem, nnz)
        return problem.weight.to(problem.precision).masked_fill(~support, 0), support

    def support(self, problem: LayerProblem, nnz: int) -> Bool[Tensor, "d_in d_out"]:
        """Return the mask of the entries to keep."""
        return prune_at_once(problem.weight.to(problem.precision), None, nnz, per_column=False)
