"""`sparsegpt`: zeroes weights input by input and compensates in later inputs, every layer at the same ratio."""

from jaxtyping import Bool, Float
from torch import Tensor

from rocket_core.linalg.compensated_pruning import prune_with_compensation
from rocket_core.methods.layer_problem import LayerProblem
from rocket_core.methods.magnitude import Magnitude


class SparseGpt(Magnitude):
    """Pruning by the error that compensation leaves.

    References:
        Frantar and Alistarh, "SparseGPT: massive language models can be accurately pruned in one-shot", 2023.
    """

    def pruned(self, problem: LayerProblem, nnz: int) -> tuple[Float[Tensor, "d_in d_out"], Bool[Tensor, "d_in d_out"]]:
        """Return the pruned weight, and which entries are kept."""
        gram = problem.statistics.gram
        assert gram is not None, "calibration was asked for the Gram matrix of the input"
        return prune_with_compensation(problem.weight.to(problem.precision), gram.to(problem.precision), nnz)
