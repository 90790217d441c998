import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rocket_core.linalg.least_squares import UnitGram, column_energies, largest, solve_on_support
from tests.reference import pruning as reference

few = settings(max_examples=60, deadline=None)
EXACT = 1e-24


def random_system(n, outputs, seed=0, spread=1.0, density=0.5):
    """Return inputs with a falling spectrum, a weight and a support."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(4 * n + 8, n, generator=generator, dtype=torch.float64)
    rotation = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64)).Q
    inputs = inputs * torch.logspace(0, -spread, n, dtype=torch.float64) @ rotation
    weight = torch.randn(n, outputs, generator=generator, dtype=torch.float64)
    return inputs, weight, torch.rand(n, outputs, generator=generator) < density


def solve(inputs, weight, support, dtype=torch.float64, **options):
    gram = inputs.T @ inputs
    products = gram @ weight
    energy = float((weight * products).sum())
    return solve_on_support(gram.to(dtype), products.to(dtype), support, energy=energy, **options)


@few
@given(
    n=st.integers(1, 14),
    outputs=st.integers(1, 6),
    spread=st.floats(0, 2),
    density=st.sampled_from([0.0, 0.2, 0.6, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_it_agrees_with_lstsq_column_by_column(n, outputs, spread, density, seed):
    inputs, weight, support = random_system(n, outputs, seed, spread, density)
    solution = solve(inputs, weight, support, tolerance=EXACT)
    torch.testing.assert_close(solution, reference.least_squares(inputs, weight, support), rtol=1e-6, atol=1e-7)
    assert not solution[~support].any()


@pytest.mark.parametrize("spread", [0.0, 1.0, 2.0])
def test_it_stops_within_a_thousandth_of_the_least_error(spread):
    inputs, weight, support = random_system(96, 40, spread=spread)
    best = reference.output_error(inputs, weight, reference.least_squares(inputs, weight, support))
    found = reference.output_error(inputs, weight, solve(inputs, weight, support))
    assert best * (1 - 1e-9) <= found <= best * 1.001


def test_unreachable_targets_are_approximated():
    # As for coefficients of a dictionary: B is AᵀY for a Y that no X gives.
    generator = torch.Generator().manual_seed(3)
    atoms = torch.randn(20, 8, generator=generator, dtype=torch.float64)
    targets = torch.randn(20, 5, generator=generator, dtype=torch.float64)
    support = torch.rand(8, 5, generator=generator) < 0.5
    found = solve_on_support(
        atoms.T @ atoms, atoms.T @ targets, support, energy=float(targets.square().sum()), tolerance=EXACT
    )
    for j in range(5):
        kept = support[:, j]
        best = torch.linalg.lstsq(atoms[:, kept], targets[:, j]).solution
        torch.testing.assert_close(found[kept, j], best, rtol=1e-8, atol=1e-9)


def test_inputs_that_never_fire_get_no_weight():
    inputs, weight, support = random_system(12, 5)
    dead = torch.tensor([0, 7])
    inputs[:, dead] = 0
    support[dead] = True
    solution = solve(inputs, weight, support, tolerance=EXACT)
    assert not solution[dead].any()
    best = reference.output_error(inputs, weight, reference.least_squares(inputs, weight, support))
    assert reference.output_error(inputs, weight, solution) == pytest.approx(best, rel=1e-9)


def test_all_zero_inputs_give_zero_weights():
    _, weight, support = random_system(6, 3)
    solution = solve(torch.zeros(9, 6, dtype=torch.float64), weight, support)
    assert torch.equal(solution, torch.zeros_like(weight))


@few
@given(seed=st.integers(0, 2**31), length=st.sampled_from([0.0, 1.0, 100.0]))
def test_the_start_does_not_change_the_solution(seed, length):
    inputs, weight, support = random_system(10, 4, seed)
    start = length * torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    before = start.clone()
    solution = solve(inputs, weight, support, start=start, tolerance=EXACT)
    assert torch.equal(start, before)
    assert not solution[~support].any()
    torch.testing.assert_close(solution, reference.least_squares(inputs, weight, support), rtol=1e-6, atol=1e-7)


def test_a_start_at_the_solution_is_returned_at_once():
    inputs, weight, support = random_system(16, 6)
    best = reference.least_squares(inputs, weight, support)
    torch.testing.assert_close(solve(inputs, weight, support, start=best), best, rtol=1e-14, atol=0)


@pytest.mark.parametrize("spread", [0.0, 1.0, 1.5])
def test_float32_loses_less_than_a_thousandth(spread):
    inputs, weight, support = random_system(128, 32, spread=spread)
    single = solve(inputs, weight, support, torch.float32)
    double = solve(inputs, weight, support)
    assert single.dtype == torch.float32
    fast, exact = (reference.output_error(inputs, weight, found.double()) for found in (single, double))
    assert fast == pytest.approx(exact, rel=1e-3)


def test_columns_are_solved_independently():
    inputs, weight, support = random_system(16, 6)
    scale = torch.logspace(-4, 4, 6, dtype=torch.float64)
    alone = solve(inputs, weight, support, tolerance=EXACT)
    scaled = solve(inputs, weight * scale, support, tolerance=EXACT * 1e-8)
    torch.testing.assert_close(scaled, alone * scale, rtol=1e-6, atol=1e-9)


@given(
    rows=st.integers(1, 8),
    columns=st.integers(1, 8),
    fraction=st.floats(0, 1),
    ties=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(deadline=None)
def test_exactly_the_largest_entries_are_chosen(rows, columns, fraction, ties, seed):
    count = round(fraction * rows * columns)
    scores = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    scores = scores.round() if ties else scores
    chosen = largest(scores, count)
    assert int(chosen.sum()) == count
    if 0 < count < scores.numel():
        assert float(scores[chosen].min()) >= float(scores[~chosen].max())


@pytest.mark.parametrize("dead", [0, 3])
@pytest.mark.parametrize("spread", [0.0, 1.0, 2.0])
def test_mean_eigenvalue_and_resolvent_match_the_gram_matrix(spread, dead):
    inputs, _, _ = random_system(24, 1, spread=spread)
    inputs[:, :dead] = 0
    unit = UnitGram.of(inputs.T @ inputs)
    eigenvalues = torch.linalg.eigvalsh(unit.matrix[dead:, dead:])
    assert unit.mean_eigenvalue == pytest.approx(float(eigenvalues.log().mean().exp()), rel=1e-2)
    expected = 0.3 * torch.linalg.inv(unit.matrix + 0.3 * torch.eye(24, dtype=torch.float64))
    torch.testing.assert_close(unit.resolvent(0.3), expected)


def test_an_unfactorizable_matrix_has_mean_eigenvalue_zero():
    one = torch.ones(300, 300)
    one[0, 1] = one[1, 0] = 1.01
    unit = UnitGram(matrix=one, lengths=torch.ones(300), fires=torch.ones(300))
    assert unit.mean_eigenvalue == 0.0


@pytest.mark.parametrize("is_transposed", [False, True])
def test_squared_norms_of_columns(is_transposed):
    matrix = torch.randn(3000, 40, generator=torch.Generator().manual_seed(0))
    expected = matrix.double().square().sum(dim=0)
    found = column_energies(matrix.T.contiguous().T if is_transposed else matrix)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
