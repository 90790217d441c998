import torch

from rocket_core.linalg.least_squares import UnitGram
from rocket_core.linalg.prepared_gram import PreparedGram
from rocket_core.linalg.rounding import RoundingGram


def test_derived_matrices_are_computed_once():
    rows = torch.randn(40, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gram = rows.T @ rows
    prepared = PreparedGram(matrix=gram)
    assert prepared.unit is prepared.unit
    assert prepared.rounding is prepared.rounding
    assert torch.equal(prepared.unit.matrix, UnitGram.of(gram).matrix)
    assert torch.equal(prepared.rounding.matrix, RoundingGram.of(gram).matrix)
