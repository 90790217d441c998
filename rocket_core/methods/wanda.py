"""`wanda`: zeroes the weights with the smallest magnitude times input norm, every output at the same ratio."""

from jaxtyping import Bool
from torch import Tensor

from rocket_core.linalg.pruning import prune_at_once
from rocket_core.methods.layer_problem import LayerProblem
from rocket_core.methods.magnitude import Magnitude


class Wanda(Magnitude):
    """Pruning by |w|·‖x‖ within each output, without a refit.

    References:
        Sun et al., "A simple and effective pruning approach for large language models", 2023.
    """

    def support(self, problem: LayerProblem, nnz: int) -> Bool[Tensor, "d_in d_out"]:
        """Return the mask of the entries to keep."""
        energy = problem.statistics.input_energy.to(problem.precision)
        return prune_at_once(problem.weight.to(problem.precision), energy, nnz, per_column=True)
