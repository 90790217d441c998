"""Numbers of tokens as people write them."""

import pytest

from rocket_core.sizes.token_counts import parse_context, parse_tokens


@pytest.mark.parametrize(
    ("text", "tokens"), [("1", 1), ("500k", 500_000), ("2M", 2_000_000), ("1.5M", 1_500_000), ("1G", 10**9)]
)
def test_a_number_may_have_a_suffix(text, tokens):
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "M", "0", "-2M", "0.5", "2MB", "nan", "inf", "two"])
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match="500k, 2M"):
        parse_tokens(text)


@pytest.mark.parametrize(("text", "tokens"), [("256", 256), ("32k", 32_768), ("128K", 131_072), ("1M", 2**20)])
def test_a_context_counts_in_powers_of_two(text, tokens):
    assert parse_context(text) == tokens


@pytest.mark.parametrize("text", ["", "k", "0", "-1", "32q", "1.0001k", "1G"])
def test_other_contexts_are_refused(text):
    with pytest.raises(ValueError, match="32k or 32768"):
        parse_context(text)
