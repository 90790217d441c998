"""`rocket`: every kind of candidate that the settings allow, at every ratio, as choices for the knapsack.

And `rocket-uniform`: the paper's factorization with every layer at the same ratio, without allocation.
"""

from collections.abc import Sequence
from dataclasses import replace

from rocket_core.candidates import Candidate, SharedCandidate
from rocket_core.config import PROFILE_RANK_NNZ_RATIOS, CompressionConfig
from rocket_core.methods import dictionary, entropy_coded, quantized, rounded_factors, sparse
from rocket_core.methods.base import Method
from rocket_core.methods.layer_problem import CompressedLayer, LayerProblem
from rocket_core.methods.sampled_outputs import SampledOutputs
from rocket_core.methods.sparse import errors_at
from rocket_core.sizes.code_format import formats_beside_coded

_COMPETING_KINDS = {"sparse", "quantized", "entropy_coded"}
# Ratios at which pruned weights are compared with codes, and the factor by which all their errors are too large.
_COMPARED_RATIOS = (0.2, 0.5, 0.8)
_HOPELESS = 1.5


class Rocket(Method):
    """Candidates of every kind (paper, section 3, and extensions)."""

    @property
    def needs_input_gram(self) -> bool:
        """Whether sparse candidates or codes are allowed, as pruning and rounding need it."""
        return self.config.calibrates and ("sparse" in self.config.kinds or self.config.quantizes)

    @property
    def shares(self) -> bool:
        """Whether the settings allow shared dictionaries."""
        return "shared" in self.config.kinds

    def profile(self, problem: LayerProblem) -> list[Candidate]:
        """Return the best factorization at each ratio, then pruned and rounded weights."""
        factored: list[Candidate] = []
        pruned: list[Candidate] = []
        codes, sample = self._codes(problem)
        if "sparse" in self.config.kinds and not (sample and self._cannot_win(sample, codes)):
            pruned = sparse.profile(problem, stored_itemsize=self.itemsize, budget_itemsize=self.budget_itemsize)
        shapes = dictionary.rank_nnz_ratios(self.config)
        if shapes:
            factored = dictionary.profile(
                problem,
                dictionary.search_of(self, dictionary.settings_of(self.config), shapes),
                objective=self.config.objective,
                competing_errors=self._competing_errors(pruned + codes, problem.shape),
            )
        return factored + pruned + codes

    def _cannot_win(self, sample: SampledOutputs, codes: Sequence[Candidate]) -> bool:
        """Return whether pruned weights are far worse than codes of the same size."""
        if not codes:
            return False
        competing = errors_at(codes, sample.problem.shape, _COMPARED_RATIOS, self.budget_itemsize)
        least = sparse.least_errors(sample, _COMPARED_RATIOS, self.budget_itemsize)
        return all(own > _HOPELESS * error for own, error in zip(least, competing, strict=True))

    def _codes(self, problem: LayerProblem) -> tuple[list[Candidate], SampledOutputs | None]:
        config = self.config
        if not config.quantizes:
            return [], None
        sample = SampledOutputs.of(problem)
        coded = entropy_coded.profile(problem, sample) if config.entropy_codes else []
        if "quantized" not in config.kinds:
            return coded, sample
        if coded:
            formats = formats_beside_coded(*problem.shape)
            if problem.is_uncalibrated:
                # One of more bits than entropy codes have is enough, in a tenth of the time.
                formats = (min(formats[1:], key=lambda one: one.stored_bytes(*problem.shape)),)
            fixed = quantized.profile(problem, sample, formats)
        else:
            fixed = quantized.profile_choices(problem, sample, config.code_choices)
        codes = fixed + coded
        factors = rounded_factors.profile(problem, sample.gram, codes) if config.codes_factors else []
        return factors + codes, sample

    def share(
        self, problem: LayerProblem, dictionary_owner: str, per_layer_candidates: Sequence[Sequence[Candidate]] = ()
    ) -> list[SharedCandidate]:
        """Return the best shared dictionary at each ratio."""
        d_in, _ = problem.shape
        competing_errors = [
            self._competing_errors(own, (d_in, d_out))
            for own, d_out in zip(per_layer_candidates, problem.output_widths, strict=False)
        ]
        return dictionary.share(
            problem,
            dictionary.search_of(self, dictionary.settings_of(self.config), PROFILE_RANK_NNZ_RATIOS),
            dictionary_owner=dictionary_owner,
            competing_errors=competing_errors if all(competing_errors) else (),
        )

    def _competing_errors(self, candidates: Sequence[Candidate], shape: tuple[int, int]) -> list[float]:
        """Return the errors of other kinds at each ratio, to compare with a dictionary's; empty to not compare."""
        kinds = {candidate.kind for candidate in candidates} & _COMPETING_KINDS
        if not kinds or self.config.objective == "weight":
            return []
        by_kind = [[candidate for candidate in candidates if candidate.kind == kind] for kind in sorted(kinds)]
        errors = [errors_at(of_kind, shape, self.ratios, self.budget_itemsize) for of_kind in by_kind]
        return [min(at_ratio) for at_ratio in zip(*errors, strict=True)]

    def compress(self, problem: LayerProblem, candidate: Candidate) -> CompressedLayer:
        """Compress the layer by the method for the candidate's kind."""
        if candidate.block_type is not None:
            return quantized.compress_blocks(problem, candidate.block_type, splitting=self.config.sequential)
        if candidate.kind == "quantized":
            code_format = replace(candidate.code_format, bfloat16_scales=self.config.reader.codes.aligned)
            return quantized.compress(problem, code_format, splitting=self.config.sequential)
        if candidate.kind == "entropy_coded":
            return entropy_coded.compress(problem, candidate.stored_bytes)
        assert candidate.nnz is not None
        if candidate.kind == "sparse":
            return sparse.compress(problem, candidate.nnz)
        assert candidate.rank is not None
        if candidate.bits is not None:
            return rounded_factors.compress(problem, candidate.rank, candidate.code_format)
        return dictionary.compress(problem, dictionary.settings_of(self.config), candidate.rank, candidate.nnz)

    def compress_shared(self, problem: LayerProblem, rank: int, nnz: int) -> CompressedLayer:
        """Compute one dictionary for all members."""
        return dictionary.compress(problem, dictionary.settings_of(self.config), rank, nnz)


class RocketUniform(Rocket):
    """The paper's ablation without its allocation (marked with a dagger in its tables).

    It uses only the paper's kinds of candidates, dictionary and coefficients, regardless of the kinds in the settings.

    References:
        ROCKET, tables 1 and 5.
    """

    uniform = True

    def __init__(self, config: CompressionConfig, itemsize: int) -> None:
        super().__init__(config.model_copy(update={"kinds": ("low_rank", "factored")}), itemsize)
