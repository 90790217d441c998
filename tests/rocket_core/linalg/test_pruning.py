import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rocket_core.linalg import pruning
from rocket_core.linalg.least_squares import UnitGram
from rocket_core.linalg.pruning import prune, prune_at_once, prune_path, split_path
from tests.reference import pruning as reference
from tests.reference import simulated_device

few = settings(max_examples=40, deadline=None)


def random_layer(d_in, d_out, seed=0, tokens=300, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(tokens, d_in, generator=generator, dtype=torch.float64)
    rotation = torch.linalg.qr(torch.randn(d_in, d_in, generator=generator, dtype=torch.float64)).Q
    inputs = inputs * torch.logspace(0, -spread, d_in, dtype=torch.float64) @ rotation
    return torch.randn(d_in, d_out, generator=generator, dtype=torch.float64), inputs


def path(weight, inputs, counts, dtype=torch.float64):
    steps = [(count, 0.1) for count in counts]
    return list(prune_path(weight, UnitGram.of((inputs.T @ inputs).to(dtype)), steps))


def pruned_to(weight, inputs, count, dtype=torch.float64):
    return prune(weight, UnitGram.of((inputs.T @ inputs).to(dtype)), count)


@few
@given(
    d_in=st.integers(1, 14),
    d_out=st.integers(1, 8),
    fractions=st.lists(st.floats(0, 1), min_size=1, max_size=4),
    seed=st.integers(0, 2**31),
)
def test_each_step_has_the_exact_count_and_the_stated_error(d_in, d_out, fractions, seed):
    weight, inputs = random_layer(d_in, d_out, seed)
    counts = sorted((max(1, round(part * d_in * d_out)) for part in fractions), reverse=True)
    before = torch.ones_like(weight, dtype=torch.bool)
    scale = reference.output_error(inputs, weight, 0 * weight)
    for count, pruned in zip(counts, path(weight, inputs, counts), strict=True):
        assert pruned.nnz == count == int(pruned.support.sum())
        assert not pruned.weight[~pruned.support].any()
        assert not (pruned.support & ~before).any()
        assert pruned.error == pytest.approx(
            reference.output_error(inputs, weight, pruned.weight), rel=1e-9, abs=1e-12 * scale
        )
        before = pruned.support


def least_error(inputs, weight, support):
    return reference.output_error(inputs, weight, reference.least_squares(inputs, weight, support))


@pytest.mark.parametrize("shape", [(64, 48), (63, 96), (512, 17)])
def test_a_sample_tells_about_which_scores_are_largest(shape, monkeypatch):
    monkeypatch.setattr(pruning, "_ORDERED", 256)
    # The energies of inputs differ, so that a sample of some inputs alone would be wrong.
    scores = torch.rand(shape, generator=torch.Generator().manual_seed(0)) * torch.linspace(0, 5, shape[1])
    for part in (0.02, 0.3, 0.5, 0.9, 1.0):
        kept = pruning._about_largest(scores, max(1, round(part * scores.numel())))
        assert float(scores[kept].min()) >= float(scores[~kept].max()) if part < 1 else kept.all()
        assert float(kept.double().mean()) == pytest.approx(part, abs=0.1)


def test_a_sample_of_scores_hardly_changes_the_error(monkeypatch):
    weight, inputs = random_layer(96, 200, spread=1.5)
    exact = pruned_to(weight, inputs, weight.numel() // 2)
    monkeypatch.setattr(pruning, "_ORDERED", 8192)
    found = pruned_to(weight, inputs, weight.numel() // 2)
    assert found.nnz == exact.nnz
    assert found.error == pytest.approx(exact.error, rel=0.02)


@pytest.mark.gpu
def test_no_turn_waits_for_a_value(accelerator):
    weight, inputs = random_layer(32, 24)
    unit = UnitGram.of((inputs.T @ inputs).to(accelerator))
    before = simulated_device.counts.waits.total()
    results = list(split_path(weight.to(accelerator), unit, [600, 400, 200]))
    # The mean eigenvalue, whether all inputs fire, and factors; none of 39 turns.
    assert simulated_device.counts.waits.total() - before <= 5
    assert [pruned.nnz for pruned in results] == [600, 400, 200]


SHAPES = [(24, 24), (40, 12), (12, 40)]
PARTS = [0.9, 0.7, 0.5, 0.25, 0.05]


@pytest.mark.parametrize("shape", SHAPES)
def test_each_step_is_nearly_optimal_on_its_support(shape):
    weight, inputs = random_layer(*shape)
    counts = [round(part * weight.numel()) for part in PARTS]
    for count, step in zip(counts, path(weight, inputs, counts), strict=True):
        best = least_error(inputs, weight, step.support)
        assert step.nnz == count
        assert best * (1 - 1e-9) <= step.error <= best / (1 - 0.1)


# By splitting if the inputs' energy is spread over directions, otherwise by steps.
@pytest.mark.parametrize(("spread", "tolerance"), [(0.0, 1e-4), (1.0, 1e-2), (2.0, 1e-2), (3.0, 1e-4)])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_pruned_weight_is_nearly_optimal_on_its_support(shape, spread, tolerance):
    weight, inputs = random_layer(*shape, spread=spread)
    for part in PARTS:
        pruned = pruned_to(weight, inputs, round(part * weight.numel()))
        best = least_error(inputs, weight, pruned.support)
        assert best * (1 - 1e-9) <= pruned.error <= best / (1 - tolerance)
        assert pruned.error == pytest.approx(reference.output_error(inputs, weight, pruned.weight), rel=1e-9)


def test_refits_after_splitting_reach_the_least_squares(monkeypatch):
    monkeypatch.setattr(pruning, "_REFITS", 600)
    weight, inputs = random_layer(20, 9)
    for count in (150, 90, 20):
        pruned = pruned_to(weight, inputs, count)
        best = reference.least_squares(inputs, weight, pruned.support)
        torch.testing.assert_close(pruned.weight, best, rtol=1e-8, atol=1e-8)


def test_errors_are_given_for_each_output():
    weight, inputs = random_layer(20, 9)
    for pruned in (pruned_to(weight, inputs, 70), *path(weight, inputs, [120, 70])):
        expected = (inputs @ (weight - pruned.weight)).square().sum(dim=0)
        torch.testing.assert_close(pruned.errors, expected, rtol=1e-9, atol=0)
        assert pruned.error == pytest.approx(float(expected.sum()), rel=1e-9)


@few
@given(d_in=st.integers(1, 14), d_out=st.integers(1, 8), fraction=st.floats(0, 1), seed=st.integers(0, 2**31))
def test_a_weight_is_pruned_to_the_exact_count(d_in, d_out, fraction, seed):
    weight, inputs = random_layer(d_in, d_out, seed)
    count = max(1, round(fraction * weight.numel()))
    pruned = pruned_to(weight, inputs, count)
    assert pruned.nnz == count
    assert not pruned.weight[~pruned.support].any()
    assert pruned.error == pytest.approx(
        reference.output_error(inputs, weight, pruned.weight),
        rel=1e-9,
        abs=1e-12 * reference.output_error(inputs, weight, 0 * weight),
    )


@pytest.mark.parametrize("part", [0.8, 0.5, 0.2])
@pytest.mark.parametrize("spread", [1.0, 1.5, 2.0])
def test_pruning_to_one_count_beats_equal_steps(part, spread):
    weight, inputs = random_layer(96, 96, spread=spread)
    count = round(part * weight.numel())
    twentieths = [round(weight.numel() * (1 - 0.05 * step)) for step in range(1, 20)]
    [*_, equal] = path(weight, inputs, [stop for stop in twentieths if stop > count] + [count])
    assert pruned_to(weight, inputs, count).error < 0.99 * equal.error


@pytest.mark.parametrize(("part", "bound"), [(0.8, 1.02), (0.65, 0.98), (0.5, 0.95), (0.3, 0.9), (0.1, 0.95)])
def test_splitting_is_nearly_as_good_as_all_steps(part, bound, monkeypatch):
    weight, inputs = random_layer(96, 96, tokens=400)
    count = round(part * weight.numel())
    split = pruned_to(weight, inputs, count)
    monkeypatch.setattr(pruning, "_LEAST_MEAN", torch.inf)
    assert split.error <= bound * pruned_to(weight, inputs, count).error


def test_a_step_removes_the_refitted_entries_of_least_energy():
    weight, inputs = random_layer(12, 6)
    first, second = path(weight, inputs, [50, 31])
    energy = inputs.square().sum(dim=0)
    # First by the weight itself, then by the refitted weight.
    for before, after in ((weight, first), (first.weight, second)):
        scores = (before.square() * energy[:, None]).masked_fill(before == 0, -1)
        kept = scores[after.support]
        assert float(kept.min()) > float(scores[~after.support].max())


def test_errors_rise_with_pruning_and_start_at_zero():
    weight, inputs = random_layer(20, 20)
    errors = [pruned.error for pruned in path(weight, inputs, range(400, 0, -40))]
    assert errors[0] == 0
    assert errors == sorted(errors)


def test_stepwise_refitting_beats_wanda_with_a_refit():
    weight, inputs = random_layer(64, 64, spread=1.5)
    [*_, stepwise] = path(weight, inputs, [3686, 3277, 2867, 2458, 2048])
    at_once = prune_at_once(weight, inputs.square().sum(dim=0), 2048, per_column=False)
    refitted = reference.least_squares(inputs, weight, at_once)
    assert stepwise.error < 0.95 * reference.output_error(inputs, weight, refitted)


@pytest.mark.parametrize("spread", [0.0, 1.0, 1.5])
def test_float32_stays_close_to_float64(spread):
    weight, inputs = random_layer(96, 48, tokens=600, spread=spread)
    counts = [3686, 2304, 922]
    for fast, exact in zip(path(weight, inputs, counts, torch.float32), path(weight, inputs, counts), strict=True):
        assert fast.weight.dtype == torch.float32
        assert fast.error == pytest.approx(exact.error, rel=5e-3)
        assert fast.error == pytest.approx(reference.output_error(inputs, weight, fast.weight.double()), rel=1e-3)


def test_inputs_that_never_fire_are_pruned_first():
    weight, inputs = random_layer(10, 10)
    inputs[:, :3] = 0
    [pruned] = path(weight, inputs, [70])
    assert not pruned.support[:3].any()
    assert pruned.error == 0
    [few_left] = path(weight, inputs, [20])
    assert torch.isfinite(few_left.weight).all()


@few
@given(d_in=st.integers(1, 9), d_out=st.integers(1, 9), fraction=st.floats(0, 1), seed=st.integers(0, 2**31))
def test_magnitude_and_wanda_equal_a_double_loop(d_in, d_out, fraction, seed):
    weight, inputs = random_layer(d_in, d_out, seed, tokens=12)
    count = max(1, round(fraction * weight.numel()))
    assert torch.equal(prune_at_once(weight, None, count, per_column=False), reference.magnitude(weight, count))
    energy = inputs.square().sum(dim=0)
    by_column = prune_at_once(weight, energy, count, per_column=True)
    assert int(by_column.sum()) == count
    assert torch.equal(by_column, reference.wanda(inputs, weight, count))


def test_equal_entries_are_pruned_to_the_exact_count():
    weight = torch.ones(6, 5)
    for per_column in (True, False):
        assert int(prune_at_once(weight, None, 13, per_column=per_column).sum()) == 13


def test_inputs_are_not_modified():
    weight, inputs = random_layer(8, 8)
    gram = inputs.T @ inputs
    before = weight.clone(), gram.clone()
    path(weight, inputs, [40, 20])
    unit = UnitGram.of(gram)
    prune(weight, unit, 20)
    assert torch.equal(unit.matrix, UnitGram.of(gram).matrix)
    prune_at_once(weight, gram.diagonal(), 9, per_column=True)
    assert torch.equal(weight, before[0])
    assert torch.equal(gram, before[1])


@pytest.mark.parametrize("spread", [0.0, 1.0, 2.0])
def test_a_split_path_stays_near_separate_pruning(spread):
    weight, inputs = random_layer(48, 40, spread=spread)
    unit = UnitGram.of(inputs.T @ inputs)
    counts = [round(part * weight.numel()) for part in (0.9, 0.7, 0.5, 0.35, 0.2)]
    for count, step in zip(counts, split_path(weight, unit, counts), strict=True):
        assert step.nnz == count
        assert step.error == pytest.approx(reference.output_error(inputs, weight, step.weight), rel=1e-9)
        assert step.error < 2.0 * prune(weight, unit, count).error


@pytest.mark.parametrize(("spread", "low", "high"), [(2.0, 0.03, 0.15), (4.0, 0.01, 0.03)])
def test_wide_layers_take_no_conjugate_gradients(spread, low, high):
    """Such steps take hours for ten thousand inputs; more iterations of splitting reach the least squares as well."""
    weight, inputs = random_layer(512, 6, tokens=1024, spread=spread)
    gram = inputs.T @ inputs
    gram.diagonal().mul_(1.001)
    unit = UnitGram.of(gram)
    assert low < unit.mean_eigenvalue < high
    factor = torch.linalg.cholesky(gram, upper=True)
    for part in (0.7, 0.5, 0.2):
        pruned = prune(weight, unit, round(part * weight.numel()))
        assert "inverse" not in vars(unit)
        best = least_error(factor, weight, pruned.support)
        assert best * (1 - 1e-9) <= pruned.error <= 1.01 * best
