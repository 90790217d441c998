import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rocket_core.linalg.sequential_target import part_way_target, token_weights, validated_target

few = settings(max_examples=60, deadline=None)


def streams(d_in, d_out, tokens, seed=0, noise=0.3):
    """Return inputs of the dense model, of the compressed one, and a weight."""
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(tokens, d_in, generator=generator, dtype=torch.float64)
    compressed = dense + noise * torch.randn(tokens, d_in, generator=generator, dtype=torch.float64)
    return dense, compressed, torch.randn(d_in, d_out, generator=generator, dtype=torch.float64)


def target(dense, compressed, weight, shrinkage):
    products = compressed.T @ (dense @ weight)
    gram = compressed.T @ compressed
    return part_way_target(weight, gram, products, tokens=len(dense), shrinkage=shrinkage, step=1.0)


def explicit(dense, compressed, weight, shrinkage):
    """Solve the least squares of [X'; √(a·diag G')] W* = [XW; √(a·diag G') W]."""
    strength = shrinkage * weight.shape[0] / len(dense)
    pull = torch.diag((strength * compressed.square().sum(dim=0)).sqrt())
    system, wanted = torch.cat([compressed, pull]), torch.cat([dense @ weight, pull @ weight])
    return torch.linalg.lstsq(system, wanted, driver="gelsd").solution


def cost(solution, dense, compressed, weight, shrinkage):
    """‖XW - X'W*‖² + a·Σ_i G'_ii ‖w_i - w*_i‖²."""
    strength = shrinkage * weight.shape[0] / len(dense)
    pull = strength * compressed.square().sum(dim=0)
    moved = dense @ weight - compressed @ solution
    return float(moved.square().sum() + (pull[:, None] * (weight - solution).square()).sum())


@few
@given(
    d_in=st.integers(1, 12),
    d_out=st.integers(1, 5),
    tokens=st.integers(1, 40),
    shrinkage=st.sampled_from([0.02, 0.05, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_it_solves_the_stacked_least_squares(d_in, d_out, tokens, shrinkage, seed):
    dense, compressed, weight = streams(d_in, d_out, tokens, seed)
    energies = compressed.square().sum(dim=0)
    # Inputs that hardly ever fire are bound to their weights by more than the shrinkage.
    assume(energies.min() > 1e-3 * energies.mean())
    found, expected = (
        cost(solution, dense, compressed, weight, shrinkage)
        for solution in (target(dense, compressed, weight, shrinkage), explicit(dense, compressed, weight, shrinkage))
    )
    # With few tokens, different weights do nearly the same.
    assert found <= expected * (1 + 1e-6) + 1e-9


def test_without_shrinkage_it_is_plain_least_squares():
    dense, compressed, weight = streams(10, 6, 50)
    best = torch.linalg.lstsq(compressed, dense @ weight).solution
    torch.testing.assert_close(target(dense, compressed, weight, 0.0), best, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("tokens", [3, 200])
@pytest.mark.parametrize("shrinkage", [0.0, 0.05])
def test_equal_inputs_give_the_weight_itself(tokens, shrinkage):
    dense, _, weight = streams(10, 6, tokens)
    torch.testing.assert_close(target(dense, dense, weight, shrinkage), weight, rtol=1e-4, atol=1e-4)


def test_inputs_that_never_fire_keep_their_weights():
    dense, compressed, weight = streams(8, 5, 60)
    compressed[:, [1, 6]] = 0
    found = target(dense, compressed, weight, 0.05)
    torch.testing.assert_close(found[[1, 6]], weight[[1, 6]], rtol=1e-9, atol=0)
    torch.testing.assert_close(found[0], explicit(dense, compressed, weight, 0.05)[0], rtol=1e-6, atol=1e-8)
    silent = target(dense, 0 * compressed, weight, 0.05)
    torch.testing.assert_close(silent, weight, rtol=1e-12, atol=0)


def test_it_brings_the_outputs_closer_than_the_weight_itself():
    dense, compressed, weight = streams(16, 8, 100, noise=1.0)
    wanted = dense @ weight
    found = target(dense, compressed, weight, 0.05)
    assert torch.linalg.norm(wanted - compressed @ found) < 0.8 * torch.linalg.norm(wanted - compressed @ weight)


@pytest.mark.parametrize("step", [0.0, 0.25, 0.5])
def test_layers_are_compressed_towards_a_part_way_target(step):
    dense, compressed, weight = streams(10, 6, 50)
    sums = compressed.T @ compressed, compressed.T @ (dense @ weight)
    found = part_way_target(weight, *sums, tokens=50, shrinkage=0.0, step=step)
    best = torch.linalg.lstsq(compressed, dense @ weight).solution
    torch.testing.assert_close(found, (1 - step) * weight + step * best, rtol=1e-7, atol=1e-8)


def test_a_token_counts_relative_to_its_output():
    outputs = torch.tensor([[0.0, 0.0], [3.0, 4.0], [30.0, 40.0]])
    torch.testing.assert_close(token_weights(outputs, 25.0), torch.tensor([1.0, 1 / 2, 1 / 101]))
    torch.testing.assert_close(token_weights(0 * outputs, 0.0), torch.ones(3))


def test_one_token_of_huge_outputs_hardly_moves_the_target():
    dense, compressed, weight = streams(12, 6, 300)
    # As the first token of a window in some models: what is left of its output differs much, and matters little.
    dense[::100] *= 40
    compressed[::100] = 20 * compressed[::100] + dense[::100] / 4
    outputs = dense @ weight
    counts = token_weights(outputs, float(outputs.square().sum(dim=1).mean()))
    others = torch.ones(300, dtype=torch.bool)
    others[::100] = False

    def left(weights):
        rows = compressed * weights[:, None]
        products = rows.T @ (dense @ weight)
        found = part_way_target(weight, rows.T @ compressed, products, tokens=300, shrinkage=0.0, step=1.0)
        return torch.linalg.norm((outputs - compressed @ found)[others])

    best = torch.linalg.lstsq(compressed[others], outputs[others]).solution
    least = torch.linalg.norm((outputs - compressed @ best)[others])
    assert left(counts) < 1.05 * least
    assert left(torch.ones(300, dtype=torch.float64)) > 1.2 * least


def halves(dense, compressed, wanted):
    """Return the Gram matrices and the products of the first and the second half of the tokens."""
    middle = len(dense) // 2
    parts = slice(None, middle), slice(middle, None)
    return [compressed[part].T @ compressed[part] for part in parts], [
        compressed[part].T @ wanted[part] for part in parts
    ]


def test_halves_that_agree_give_the_largest_step():
    dense, compressed, weight = streams(10, 6, 50)
    dense, compressed = dense.repeat(2, 1), compressed.repeat(2, 1)
    found = validated_target(weight, *halves(dense, compressed, dense @ weight), tokens=100, shrinkage=0.0, step=0.5)
    best = torch.linalg.lstsq(compressed, dense @ weight).solution
    torch.testing.assert_close(found, (weight + best) / 2, rtol=1e-7, atol=1e-8)


def test_halves_that_contradict_each_other_change_nothing():
    dense, compressed, weight = streams(10, 6, 50)
    lacking = torch.randn(50, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wanted = torch.cat([compressed @ weight + lacking, compressed @ weight - lacking])
    grams, products = halves(dense.repeat(2, 1), compressed.repeat(2, 1), wanted)
    found = validated_target(weight, grams, products, tokens=100, shrinkage=0.0, step=0.5)
    torch.testing.assert_close(found, weight, rtol=1e-7, atol=1e-8)


def test_noise_of_few_tokens_is_hardly_fitted():
    """What the compressed model lacks has nothing to do with what the layer reads."""
    _, compressed, weight = streams(40, 6, 120)
    noise = torch.randn(120, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    grams, products = halves(compressed, compressed, compressed @ weight + noise)
    validated = validated_target(weight, grams, products, tokens=120, shrinkage=0.0, step=0.5)
    plain = part_way_target(weight, sum(grams), sum(products), tokens=120, shrinkage=0.0, step=0.5)
    assert (validated - weight).norm() < 0.3 * (plain - weight).norm()
