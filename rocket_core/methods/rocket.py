"""`rocket`: every kind of candidate that the settings allow, at every ratio, as choices for the knapsack."""

from collections.abc import Sequence

from rocket_core.candidates import Candidate, SharedCandidate
from rocket_core.config import PROFILE_RANK_NNZ_RATIOS
from rocket_core.methods import dictionary, sparse
from rocket_core.methods.base import Method
from rocket_core.methods.layer_problem import Compressed, LayerProblem


class Rocket(Method):
    """Low-rank, factored, shared and sparse candidates (paper, section 3, and extensions)."""

    @property
    def needs_input_gram(self) -> bool:
        """Whether sparse candidates are allowed, as pruning needs it."""
        return "sparse" in self.config.kinds

    @property
    def shares(self) -> bool:
        """Whether the settings allow shared dictionaries."""
        return "shared" in self.config.kinds

    def profile(self, problem: LayerProblem) -> list[Candidate]:
        """Return the best factorization at each ratio, then pruned weights."""
        found: list[Candidate] = []
        pruned = sparse.profile(problem, (self.itemsize, self.budget_itemsize)) if "sparse" in self.config.kinds else []
        shapes = dictionary.rank_nnz_ratios(self.config)
        if shapes:
            found += dictionary.profile(
                problem,
                dictionary.settings_of(self.config),
                ratios=self.ratios,
                shapes=shapes,
                objective=self.config.objective,
                itemsizes=(self.itemsize, self.budget_itemsize),
                rivals=self._rivals(pruned, problem.shape),
            )
        return found + pruned

    def share(
        self, problem: LayerProblem, dictionary_owner: str, alone: Sequence[Sequence[Candidate]] = ()
    ) -> list[SharedCandidate]:
        """Return the best shared dictionary at each ratio."""
        d_in, _ = problem.shape
        rivals = [self._rivals(own, (d_in, d_out)) for own, d_out in zip(alone, problem.members, strict=False)]
        return dictionary.share(
            problem,
            dictionary.settings_of(self.config),
            ratios=self.ratios,
            shapes=PROFILE_RANK_NNZ_RATIOS,
            dictionary_owner=dictionary_owner,
            itemsizes=(self.itemsize, self.budget_itemsize),
            rivals=rivals if all(rivals) else (),
        )

    def _rivals(self, candidates: Sequence[Candidate], shape: tuple[int, int]) -> list[float]:
        """Return the errors of pruned weights at each ratio, to compare with a dictionary's; empty to not compare."""
        pruned = [candidate for candidate in candidates if candidate.kind == "sparse"]
        if not pruned or self.config.objective == "weight":
            return []
        return sparse.errors_at(pruned, shape, self.ratios, self.budget_itemsize)

    def compress(self, problem: LayerProblem, candidate: Candidate) -> Compressed:
        """Compress the layer by the method for the candidate's kind."""
        assert candidate.nnz is not None
        if candidate.kind == "sparse":
            return sparse.compress(problem, candidate.nnz)
        assert candidate.rank is not None
        return dictionary.compress(problem, dictionary.settings_of(self.config), candidate.rank, candidate.nnz)

    def compress_shared(self, problem: LayerProblem, rank: int, nnz: int) -> Compressed:
        """Compute one dictionary for all members."""
        return dictionary.compress(problem, dictionary.settings_of(self.config), rank, nnz)
