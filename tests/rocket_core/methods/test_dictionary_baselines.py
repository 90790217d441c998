import pytest
import torch

from rocket_core.config import CompressionConfig
from rocket_core.methods import method_for
from tests.reference.problems import example


@pytest.mark.parametrize("shape", [(24, 24), (36, 12), (12, 36)])
@pytest.mark.parametrize("ratio", [0.2, 0.5])
def test_it_is_better_than_the_truncation_it_starts_from(shape, ratio):
    layer = example(shape[0], shape[1:])
    cospadi = method_for(CompressionConfig(ratio=ratio, method="cospadi"), 2)
    [candidate] = cospadi.profile(layer.problem)
    per_column = candidate.nnz // shape[1]
    # The leading rows of ΣVᵀ, in each column the largest of them.
    _, values, right = torch.linalg.svd(layer.inputs @ layer.problem.weight, full_matrices=False)
    rows = values[:, None] * right
    truncated = rows.clone()
    truncated[candidate.rank :] = 0
    for j in range(shape[1]):
        truncated[truncated[:, j].abs().argsort(descending=True)[per_column:], j] = 0
    start = float(torch.linalg.norm(rows - truncated) / torch.linalg.norm(rows))
    assert candidate.reconstruction_error < 0.95 * start


def test_each_output_has_about_half_as_many_nonzeros_as_atoms():
    layer = example(40, (30,))
    cospadi = method_for(CompressionConfig(ratio=0.5, method="cospadi"), 2)
    [candidate] = cospadi.profile(layer.problem)
    factors = cospadi.compress(layer.problem, candidate).factors
    [per_column] = set(factors.support.sum(dim=0).tolist())
    # The rest of the budget after the last whole atom is less than 40 + 30 / 2.
    assert candidate.rank // 2 <= per_column <= candidate.rank / 2 + 55 / 30
    assert candidate.nnz == 30 * per_column


def test_a_layer_too_small_for_the_ratio_has_no_candidate():
    cospadi = method_for(CompressionConfig(ratio=0.9, method="cospadi"), 2)
    assert cospadi.profile(example(3, (3,)).problem) == []
