"""`svd-llm`: the truncated singular value decomposition of the whitened weight, every layer at the same ratio."""

from rocket_core.candidates import Candidate
from rocket_core.linalg.factorization import FactorizerSettings
from rocket_core.methods import dictionary
from rocket_core.methods.base import Method
from rocket_core.methods.layer_problem import CompressedLayer, LayerProblem


class SvdLlm(Method):
    """Low-rank factors of least output error.

    References:
        Wang et al., "SVD-LLM: Truncation-aware singular value decomposition", 2025.
    """

    uniform = True

    def profile(self, problem: LayerProblem) -> list[Candidate]:
        """Return one candidate, with the largest rank within the ratio."""
        return dictionary.profile(
            problem,
            FactorizerSettings(),
            ratios=self.ratios,
            shapes=(1.0,),
            objective="whitened",
            stored_itemsize=self.itemsize,
            budget_itemsize=self.budget_itemsize,
        )

    def compress(self, problem: LayerProblem, candidate: Candidate) -> CompressedLayer:
        """Truncate the decomposition at the candidate's rank."""
        assert candidate.rank is not None
        assert candidate.nnz is not None
        return dictionary.compress(problem, FactorizerSettings(), candidate.rank, candidate.nnz)
