import math

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, BertModel

from rocket_core.errors import CheckpointError, EmptyCalibrationError, InvalidConfigError
from rocket_core.evaluation.drift import masked_mean, mean_cosine_drift, pooled_outputs, sentences
from tests.reference.encoders import build_bert, word_tokenizer
from tests.reference.tiny_models import build_mistral_embedding

SENTENCES = ("one", "two three", "one two three four five six", "six five")


def cosine(one, other):
    dot = math.fsum(left * right for left, right in zip(one, other, strict=True))
    return dot / math.sqrt(math.fsum(value**2 for value in one) * math.fsum(value**2 for value in other))


def test_drift_is_one_minus_the_mean_cosine():
    dense = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).double()
    compressed = torch.randn(5, 8, generator=torch.Generator().manual_seed(1)).double()
    exact = sum(1 - cosine(*pair) for pair in zip(dense.tolist(), compressed.tolist(), strict=True)) / 5

    assert mean_cosine_drift(dense, compressed) == pytest.approx(exact, rel=1e-12)


def test_drift_is_zero_for_multiples_and_two_for_opposites():
    vectors = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))

    assert mean_cosine_drift(vectors, vectors) == 0
    assert mean_cosine_drift(vectors, 7 * vectors) == pytest.approx(0, abs=1e-14)
    assert mean_cosine_drift(vectors, -vectors) == pytest.approx(2)


def test_small_drift_keeps_its_precision():
    angle = 1e-7
    dense, compressed = torch.tensor([[1.0, 0.0]]), torch.tensor([[math.cos(angle), math.sin(angle)]]).double()

    assert mean_cosine_drift(dense.double(), compressed) == pytest.approx(angle**2 / 2, rel=1e-6)


def test_the_mean_is_over_the_masked_tokens():
    states = torch.arange(12.0).reshape(2, 3, 2)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])

    assert masked_mean(states, mask).tolist() == [[1.0, 2.0], [8.0, 9.0]]


def test_half_precision_states_are_averaged_in_float32():
    states = torch.full((1, 1000, 1), 1.001, dtype=torch.bfloat16)

    assert masked_mean(states, torch.ones(1, 1000, dtype=torch.int64)).dtype == torch.float32


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_a_sentence_in_a_batch_is_pooled_as_if_alone(batch_size):
    model, tokenizer = build_bert(), word_tokenizer()
    alone = []
    for sentence in SENTENCES:
        with torch.no_grad():
            alone.append(model(**tokenizer(sentence, return_tensors="pt")).last_hidden_state[0].mean(0))

    pooled, tokens = pooled_outputs(model, tokenizer, SENTENCES, length=64, batch_size=batch_size)

    torch.testing.assert_close(pooled, torch.stack(alone), atol=1e-5, rtol=1e-4)
    assert tokens == sum(len(sentence.split()) + 2 for sentence in SENTENCES)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_decoder_is_pooled_at_its_last_token_in_any_batch(side):
    model, tokenizer = build_mistral_embedding(), word_tokenizer()
    tokenizer.pad_token, tokenizer.padding_side = None, side
    alone = []
    for sentence in SENTENCES:
        with torch.no_grad():
            alone.append(model(**tokenizer(sentence, return_tensors="pt")).last_hidden_state[0, -1])

    pooled, tokens = pooled_outputs(model, tokenizer, SENTENCES, length=64, batch_size=3)

    torch.testing.assert_close(pooled, torch.stack(alone), atol=1e-5, rtol=1e-4)
    assert tokens == sum(len(sentence.split()) + 2 for sentence in SENTENCES)
    assert tokenizer.pad_token is None


def test_long_sentences_are_truncated():
    model, tokenizer = build_bert(), word_tokenizer()

    pooled, tokens = pooled_outputs(model, tokenizer, ["one two three four"], length=4, batch_size=1)

    expected, _ = pooled_outputs(model, tokenizer, ["one two"], length=64, batch_size=1)
    assert tokens == 4
    assert torch.equal(pooled, expected)


def test_a_model_with_a_head_is_pooled_below_the_head():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = BertForMaskedLM(BertConfig(**build_bert().config.to_diff_dict())).eval()
    bare = BertModel(model.config, add_pooling_layer=False).eval()
    bare.load_state_dict(model.bert.state_dict())

    pooled, _ = pooled_outputs(model, word_tokenizer(), SENTENCES, length=64, batch_size=4)

    expected, _ = pooled_outputs(bare, word_tokenizer(), SENTENCES, length=64, batch_size=4)
    assert torch.equal(pooled, expected)


def test_progress_counts_sentences_to_the_end():
    seen = []

    pooled_outputs(
        build_bert(), word_tokenizer(), SENTENCES, length=8, batch_size=3, on_progress=lambda *told: seen.append(told)
    )

    assert seen == [(3, 4), (4, 4)]


def test_unpoolable_input_is_an_error():
    model, tokenizer = build_bert(), word_tokenizer()
    with pytest.raises(EmptyCalibrationError):
        pooled_outputs(model, tokenizer, [], length=8, batch_size=1)
    with pytest.raises(InvalidConfigError, match="eval"):
        pooled_outputs(build_bert().train(), tokenizer, SENTENCES, length=8, batch_size=1)
    with torch.no_grad():
        model.encoder.layer[1].output.dense.weight[0, 0] = math.nan
    with pytest.raises(CheckpointError, match="sentences 0 to 1"):
        pooled_outputs(model, tokenizer, SENTENCES, length=8, batch_size=2)


def test_sentences_are_the_nonempty_lines():
    assert list(sentences([" a b \n\n c\n", "", "\n \n", "d"])) == ["a b", "c", "d"]
