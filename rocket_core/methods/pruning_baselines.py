"""`magnitude`, `wanda` and `sparsegpt`: pruning of every layer at the same ratio, as others do it."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rocket_core.candidates import Candidate
from rocket_core.layers import LayerFactors
from rocket_core.linalg.compensated_pruning import prune_with_compensation
from rocket_core.linalg.least_squares import output_errors
from rocket_core.linalg.pruning import prune_at_once
from rocket_core.methods import sparse
from rocket_core.methods.base import Method
from rocket_core.methods.layer_problem import CompressedLayer, LayerProblem, relative_error
from rocket_core.sizes import budget


class Magnitude(Method):
    """Zeroes the weights with the smallest |w|, without calibration and without a refit.

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
        length = torch.linalg.matrix_norm(weight.double())
        candidates = []
        for nnz in sparse.counts(*problem.shape, self.ratios, self.budget_itemsize):
            pruned, _ = self.pruned(problem, nnz)
            error = float(output_errors(gram, weight - pruned).sum())
            distance = torch.linalg.matrix_norm((weight - pruned).double())
            candidates.append(
                Candidate(
                    kind="sparse",
                    nnz=nnz,
                    kept_parameters=nnz,
                    stored_bytes=budget.sparse_bytes(*problem.shape, nnz, self.itemsize),
                    reconstruction_error=relative_error(error, energy),
                    weight_error=float(distance / length) if float(length) > 0 else 0.0,
                    loss=problem.predicted_loss_increase(error),
                )
            )
        return candidates

    def compress(self, problem: LayerProblem, candidate: Candidate) -> CompressedLayer:
        """Prune to as many entries as the candidate keeps."""
        assert candidate.nnz is not None
        pruned, support = self.pruned(problem, candidate.nnz)
        factors = LayerFactors(dictionary=None, coefficients=problem.unscaled(pruned), support=support)
        removed = problem.weight.to(problem.precision) - pruned
        return CompressedLayer(factors=factors, errors=output_errors(problem.gram(), removed))

    def pruned(self, problem: LayerProblem, nnz: int) -> tuple[Float[Tensor, "d_in d_out"], Bool[Tensor, "d_in d_out"]]:
        """Return the weight with all other entries set to zero, and which entries are kept."""
        support = self.support(problem, nnz)
        return problem.weight.to(problem.precision).masked_fill(~support, 0), support

    def support(self, problem: LayerProblem, nnz: int) -> Bool[Tensor, "d_in d_out"]:
        """Return the mask of the entries to keep."""
        return prune_at_once(problem.weight.to(problem.precision), None, nnz, per_column=False)


class Wanda(Magnitude):
    """Zeroes the weights with the smallest |w|·‖x‖ of each output, without a refit.

    References:
        Sun et al., "A simple and effective pruning approach for large language models", 2023.
    """

    def support(self, problem: LayerProblem, nnz: int) -> Bool[Tensor, "d_in d_out"]:
        """Return the mask of the entries to keep."""
        energy = problem.statistics.input_energy.to(problem.precision)
        return prune_at_once(problem.weight.to(problem.precision), energy, nnz, per_column=True)


class SparseGpt(Magnitude):
    """Zeroes weights input by input, by the error that is left once later inputs have compensated.

    References:
        Frantar and Alistarh, "SparseGPT: massive language models can be accurately pruned in one-shot", 2023.
    """

    def pruned(self, problem: LayerProblem, nnz: int) -> tuple[Float[Tensor, "d_in d_out"], Bool[Tensor, "d_in d_out"]]:
        """Return the pruned weight, and which entries are kept."""
        gram = problem.statistics.gram
        assert gram is not None, "calibration was asked for the Gram matrix of the input"
        return prune_with_compensation(problem.weight.to(problem.precision), gram.to(problem.precision), nnz)
