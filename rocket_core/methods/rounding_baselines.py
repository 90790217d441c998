"""`rtn` and `gptq`: rounding of every layer in one format, as others do it."""

import torch

from rocket_core.candidates import Candidate
from rocket_core.linalg.integer_codes import RoundedWeight, Scales, search_scales
from rocket_core.linalg.least_squares import output_errors
from rocket_core.linalg.rounding import RoundingGram, gptq, round_to_nearest
from rocket_core.methods.base import Method
from rocket_core.methods.layer_problem import CompressedLayer, LayerProblem, relative_error
from rocket_core.methods.quantized import candidate_of
from rocket_core.sizes.code_format import CodeFormat
from rocket_core.sizes.target import ByFormat

_GPTQ_DAMPING = 0.01


class Rtn(Method):
    """Rounds every weight to the nearest integer code, without calibration.

    Each scale is a positive float16 number that minimises the squared error of the group's weights.

    References:
        Dettmers and Zettlemoyer, "The case for 4-bit precision: k-bit inference scaling laws", 2023.
    """

    uniform = True

    @property
    def needs_input_gram(self) -> bool:
        """True, to measure the error."""
        return True

    def profile(self, problem: LayerProblem) -> list[Candidate]:
        """Return one candidate, in the format of the settings."""
        target = self.config.target
        assert isinstance(target, ByFormat), "the settings give the method a format"
        code_format = target.code_format(problem.shape[0])
        weight = problem.weight.to(problem.precision)
        removed = weight - self.rounded(problem, code_format).weight(weight.dtype)
        error, energy = (float(output_errors(problem.gram(), part).sum()) for part in (removed, weight))
        distance, length = (float(part.double().square().sum()) for part in (removed, weight))
        return [
            candidate_of(
                problem,
                code_format,
                reconstruction_error=relative_error(error, energy),
                weight_error=relative_error(distance, length),
                loss=None,
            )
        ]

    def compress(self, problem: LayerProblem, candidate: Candidate) -> CompressedLayer:
        """Round the weight."""
        rounded = self.rounded(problem, candidate.code_format)
        weight = problem.weight.to(problem.precision)
        return CompressedLayer(
            factors=rounded, errors=output_errors(problem.gram(), weight - rounded.weight(weight.dtype))
        )

    def rounded(self, problem: LayerProblem, code_format: CodeFormat) -> RoundedWeight:
        """Return the codes and scales of a layer."""
        return round_to_nearest(problem.weight.to(problem.precision), self.scales(problem, code_format))

    def scales(self, problem: LayerProblem, code_format: CodeFormat) -> Scales:
        """Return the scale of each group and output."""
        weight = problem.weight.to(problem.precision)
        return search_scales(weight, torch.ones_like(weight[:, 0]), code_format, positive=True)


class Gptq(Rtn):
    """GPTQ as it is used: activation order, static groups, scales of `rtn`, and a damping of 0.01.

    References:
        Frantar et al., "GPTQ: accurate post-training quantization for generative pre-trained transformers", 2022.
    """

    def rounded(self, problem: LayerProblem, code_format: CodeFormat) -> RoundedWeight:
        """Return the codes and scales of a layer."""
        gram = problem.statistics.gram
        assert gram is not None, "calibration was asked for the Gram matrix of the input"
        weight = problem.weight.to(problem.precision)
        return gptq(
            weight,
            RoundingGram.of(gram.to(problem.precision), damping=_GPTQ_DAMPING),
            self.scales(problem, code_format),
        )
