"""`svd-llm` and `cospadi`: low-rank factors and learned dictionaries, every layer at the same ratio."""

import torch

from rocket_core.candidates import Candidate
from rocket_core.linalg.dictionary_learning import learn_dictionary
from rocket_core.linalg.factorization import Factorization, FactorizerSettings, PreparedLayer, with_best_dictionary
from rocket_core.methods import dictionary
from rocket_core.methods.base import Method
from rocket_core.methods.layer_problem import CompressedLayer, LayerProblem
from rocket_core.sizes import budget

_RANK_NNZ_RATIO = 2.0
# Five more iterations lower the error by only another hundredth.
_ITERATIONS = 10


class SvdLlm(Method):
    """Low-rank factors of least output error.

    References:
        Wang et al., "SVD-LLM: Truncation-aware singular value decomposition", 2025.
    """

    uniform = True

    def profile(self, problem: LayerProblem) -> list[Candidate]:
        """Return one candidate, with the largest rank within the ratio."""
        return dictionary.profile(problem, dictionary.search_of(self, FactorizerSettings(), (1.0,)))

    def compress(self, problem: LayerProblem, candidate: Candidate) -> CompressedLayer:
        """Truncate the decomposition at the candidate's rank."""
        assert candidate.rank is not None
        assert candidate.nnz is not None
        return dictionary.compress(problem, FactorizerSettings(), candidate.rank, candidate.nnz)


class Cospadi(Method):
    """K-SVD with orthogonal matching pursuit on the whitened weight, with equally many nonzeros in every column.

    There are two atoms per nonzero of a column, or slightly fewer if the budget leaves room for more nonzeros. Computed
    in the coordinates of the eigenbasis, with the leading singular directions as initial atoms, which is where `rocket`
    stops. Takes seconds for a layer with a few hundred inputs and outputs and many minutes for one with some thousands,
    twice: for the profile and for the factors.

    References:
        Shopkhoev et al., "CoSpaDi: Compressing LLMs via calibration-guided sparse dictionary learning", 2025.
    """

    uniform = True

    def profile(self, problem: LayerProblem) -> list[Candidate]:
        """Return one candidate, with the most atoms within the ratio."""
        d_in, d_out = problem.shape
        shapes = [
            shape
            for ratio in self.ratios
            for shape in budget.candidate_shapes(d_in, d_out, ratio, (_RANK_NNZ_RATIO,), itemsize=self.budget_itemsize)
        ]
        layer = dictionary.prepare(problem, FactorizerSettings())
        return [
            dictionary.candidate(problem, _factorize(layer, rank, nnz // d_out), self.itemsize)
            for rank, nnz in shapes
            if nnz >= d_out
        ]

    def compress(self, problem: LayerProblem, candidate: Candidate) -> CompressedLayer:
        """Learn the dictionary; the nonzeros per column are rounded down, and the remainder is not used."""
        assert candidate.rank is not None
        assert candidate.nnz is not None
        layer = dictionary.prepare(problem, FactorizerSettings())
        factorization = _factorize(layer, candidate.rank, candidate.nnz // problem.shape[1])
        return dictionary.compressed(problem, factorization)


def _factorize(layer: PreparedLayer, rank: int, per_column: int) -> Factorization:
    whitened = layer.whitened
    start = torch.eye(whitened.shape[0], rank, dtype=whitened.dtype, device=whitened.device)
    learned = learn_dictionary(whitened, start, min(per_column, rank), iterations=_ITERATIONS)
    nnz = int(learned.support.sum())
    return with_best_dictionary(layer, learned.coefficients, learned.support, learned.atoms, nnz=nnz)
