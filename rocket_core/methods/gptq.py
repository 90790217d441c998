"""`gptq`: rounds input by input and compensates each error, every layer in one format."""

from rocket_core.linalg.integer_codes import RoundedWeight
from rocket_core.linalg.rounding import RoundingGram, gptq
from rocket_core.methods.layer_problem import LayerProblem
from rocket_core.methods.rtn import Rtn
from rocket_core.sizes.code_format import CodeFormat

_DAMPING = 0.01


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
            weight, RoundingGram.of(gram.to(problem.precision), damping=_DAMPING), self.scales(problem, code_format)
        )
