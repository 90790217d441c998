import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rocket_core.linalg import dictionary_learning
from rocket_core.linalg.dictionary_learning import learn_dictionary, orthogonal_matching_pursuit
from tests.reference import dictionary_learning as reference

few = settings(max_examples=40, deadline=None)


def random_atoms(rows, rank, generator):
    atoms = torch.randn(rows, rank, generator=generator, dtype=torch.float64)
    return atoms / torch.linalg.vector_norm(atoms, dim=0)


def instance(rows=12, rank=10, columns=20, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(0, -1, rows, dtype=torch.float64)[:, None]
    targets = scale * torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return random_atoms(rows, rank, generator), targets


@few
@given(
    rows=st.integers(1, 10),
    rank=st.integers(1, 14),
    columns=st.integers(1, 8),
    fraction=st.floats(0, 1),
    seed=st.integers(0, 2**31),
)
def test_pursuit_equals_a_loop_over_columns(rows, rank, columns, fraction, seed):
    atoms, targets = instance(rows, rank, columns, seed)
    # Once there are more nonzeros than rows, nothing is left to explain.
    nonzeros = max(1, round(fraction * min(rows, rank)))
    coefficients, support = orthogonal_matching_pursuit(atoms, targets, nonzeros)
    expected = reference.orthogonal_matching_pursuit(atoms, targets, nonzeros)
    torch.testing.assert_close(atoms @ coefficients, atoms @ expected, rtol=1e-6, atol=1e-8)
    if nonzeros < rows:
        torch.testing.assert_close(coefficients, expected, rtol=1e-6, atol=1e-7)
    assert (support.sum(dim=0) == nonzeros).all()
    assert not coefficients[~support].any()


def test_pursuit_in_chunks_gives_the_same_result(monkeypatch):
    atoms, targets = instance()
    whole = orthogonal_matching_pursuit(atoms, targets, 5)
    monkeypatch.setattr(dictionary_learning, "_NUMBERS_AT_ONCE", 1)
    monkeypatch.setattr(dictionary_learning, "_LEAST_COLUMNS", 3)
    parts = orthogonal_matching_pursuit(atoms, targets, 5)
    torch.testing.assert_close(parts[0], whole[0], rtol=1e-12, atol=1e-12)
    assert torch.equal(parts[1], whole[1])


def test_pursuit_survives_dependent_atoms_and_zero_columns():
    atoms, targets = instance(rows=6, rank=8)
    atoms[:, 1] = atoms[:, 0]
    atoms[:, 2] = 0
    targets[:, 0] = 0
    for dtype in (torch.float64, torch.float32):
        coefficients, support = orthogonal_matching_pursuit(atoms.to(dtype), targets.to(dtype), 8)
        assert torch.isfinite(coefficients).all()
        assert not coefficients[:, 0].any()
        assert support.all()
        torch.testing.assert_close((atoms.to(dtype) @ coefficients).double(), targets, rtol=1e-3, atol=1e-3)


@few
@given(
    rows=st.integers(2, 12),
    rank=st.integers(1, 12),
    columns=st.integers(1, 16),
    fraction=st.floats(0, 1),
    seed=st.integers(0, 2**31),
)
def test_errors_never_increase_and_the_last_is_that_of_factors(rows, rank, columns, fraction, seed):
    atoms, targets = instance(rows, rank, columns, seed)
    nonzeros = max(1, round(fraction * rank))
    learned = learn_dictionary(targets, atoms, nonzeros, iterations=6)
    scale = float(targets.square().sum())
    assert all(
        after <= before + 1e-12 * scale for before, after in zip(learned.errors, learned.errors[1:], strict=False)
    )
    explicit = float((targets - learned.atoms @ learned.coefficients).square().sum())
    assert learned.errors[-1] == pytest.approx(explicit, rel=1e-6, abs=1e-12 * scale)
    assert (learned.support.sum(dim=0) == nonzeros).all()
    assert not learned.coefficients[~learned.support].any()
    torch.testing.assert_close(
        torch.linalg.vector_norm(learned.atoms, dim=0), torch.ones(rank, dtype=torch.float64), rtol=1e-9, atol=0
    )


def test_learning_recovers_an_existing_dictionary():
    generator = torch.Generator().manual_seed(4)
    atoms = random_atoms(8, 12, generator)
    coefficients = torch.randn(12, 400, generator=generator, dtype=torch.float64)
    keep = torch.rand(12, 400, generator=generator).argsort(dim=0) < 2
    targets = atoms @ (coefficients * keep)
    start = atoms + 0.15 * random_atoms(8, 12, generator)
    learned = learn_dictionary(targets, start / torch.linalg.vector_norm(start, dim=0), 2, iterations=40)
    # Not zero: the pursuit is greedy, and does not find every pair of atoms.
    assert learned.errors[-1] < 0.5 * learned.errors[0]
    closest = (learned.atoms.T @ atoms).abs().max(dim=0).values
    assert float(closest.min()) > 0.99


def test_each_atom_is_the_best_for_its_coefficients():
    # With one atom and one nonzero per column, K-SVD is the power method: it ends at the leading singular pair.
    _, targets = instance(columns=30)
    start = torch.eye(12, 1, dtype=torch.float64)
    learned = learn_dictionary(targets, start, 1, iterations=50)
    values = torch.linalg.svdvals(targets)
    assert learned.errors[-1] == pytest.approx(float(values[1:].square().sum()), rel=1e-2)


def test_unused_atoms_are_replaced_by_the_worst_columns():
    targets = torch.eye(4, 6, dtype=torch.float64)
    targets[:, 4:] = torch.eye(4, dtype=torch.float64)[:, :2]
    start = torch.eye(4, dtype=torch.float64)[:, [0, 1, 1, 1]]
    learned = learn_dictionary(targets, start, 1, iterations=5)
    assert learned.errors[0] == pytest.approx(2)
    assert learned.errors[-1] == pytest.approx(0, abs=1e-12)


def test_learning_is_deterministic_and_keeps_its_start():
    atoms, targets = instance()
    before = atoms.clone(), targets.clone()
    first, second = (learn_dictionary(targets, atoms, 4, iterations=3) for _ in range(2))
    assert torch.equal(atoms, before[0])
    assert torch.equal(targets, before[1])
    assert torch.equal(first.coefficients, second.coefficients)
    assert len(learn_dictionary(targets, atoms, 4, iterations=0).errors) == 1
