import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rocket_core.evaluation.divergence import token_divergence
from tests.reference.language_models import divergence_of


def random_logits(tokens, vocabulary, seed, scale=3.0):
    return scale * torch.randn(tokens, vocabulary, generator=torch.Generator().manual_seed(seed))


def test_it_equals_the_explicit_sum_over_the_vocabulary():
    dense, compressed = random_logits(7, 11, 0).double(), random_logits(7, 11, 1).double()

    result = token_divergence(dense, compressed)

    exact = math.fsum(divergence_of(*pair) for pair in zip(dense.tolist(), compressed.tolist(), strict=True))
    assert result.kl_divergence == pytest.approx(exact, rel=1e-12)
    assert result.tokens == 7


def test_the_divergence_is_taken_from_dense_to_compressed():
    dense, compressed = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.1]]).log()

    result = token_divergence(dense, compressed)

    assert result.kl_divergence == pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1), rel=1e-6)


def test_equal_logits_have_zero_divergence_and_full_agreement():
    logits = random_logits(20, 50, 0, scale=30.0).bfloat16()

    result = token_divergence(logits, logits.clone())

    assert (result.kl_divergence, result.agreements) == (0.0, 20)


def test_a_constant_added_to_all_logits_changes_nothing():
    logits = random_logits(5, 9, 0).double()

    assert token_divergence(logits, logits + 100).kl_divergence == pytest.approx(0, abs=1e-12)


def test_agreement_counts_positions_with_the_same_first_maximum():
    dense = torch.tensor([[1.0, 2.0, 0.0], [5.0, 5.0, 0.0], [0.0, 0.0, 1.0], [3.0, 0.0, 0.0]])
    compressed = torch.tensor([[0.0, 9.0, 8.0], [9.0, 1.0, 0.0], [0.0, 1.0, 0.9], [0.0, 0.0, 0.1]])

    assert token_divergence(dense, compressed).agreements == 2


@pytest.mark.parametrize("chunk_bytes", [1, 24 * 13 * 3, 10**9])
def test_chunks_change_nothing(chunk_bytes):
    dense, compressed = random_logits(10, 13, 0), random_logits(10, 13, 1)

    whole, chunked = token_divergence(dense, compressed), token_divergence(dense, compressed, chunk_bytes=chunk_bytes)

    assert chunked.kl_divergence == pytest.approx(whole.kl_divergence, rel=1e-12)
    assert (chunked.agreements, chunked.tokens) == (whole.agreements, 10)


def test_distant_logits_neither_overflow_nor_lose_precision():
    dense, compressed = torch.tensor([[1e4, 0.0]]), torch.tensor([[0.0, 1e4]])

    assert token_divergence(dense, compressed).kl_divergence == pytest.approx(1e4)


def test_half_precision_is_compared_in_float64():
    dense, compressed = random_logits(30, 64, 0).bfloat16(), random_logits(30, 64, 1).bfloat16()

    result = token_divergence(dense, compressed)

    assert result == token_divergence(dense.double(), compressed.double())


def test_inputs_are_not_modified():
    dense, compressed = random_logits(4, 6, 0).double(), random_logits(4, 6, 1).double()
    before = dense.clone(), compressed.clone()

    token_divergence(dense, compressed)

    assert torch.equal(dense, before[0])
    assert torch.equal(compressed, before[1])


@given(seed=st.integers(0, 10**6), noise=st.floats(1e-6, 10.0))
@settings(deadline=None, max_examples=50)
def test_divergence_is_never_negative_and_additive_over_tokens(seed, noise):
    dense = random_logits(6, 17, seed)
    compressed = dense + noise * random_logits(6, 17, seed + 1)

    halves = token_divergence(dense[:2], compressed[:2]) + token_divergence(dense[2:], compressed[2:])

    whole = token_divergence(dense, compressed)
    assert whole.kl_divergence > -1e-12
    assert halves.kl_divergence == pytest.approx(whole.kl_divergence, rel=1e-9, abs=1e-14)
    assert (halves.agreements, halves.tokens) == (whole.agreements, whole.tokens)
