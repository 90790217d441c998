import gc
import math
import weakref

import pytest
import torch
from transformers import T5Config, ViTConfig

from rocket_core.errors import InsufficientDiskError, InvalidConfigError, UnsupportedArchitectureError
from rocket_core.evaluation import (
    EvaluationText,
    Measurement,
    compare_models,
    comparison,
    load_model,
    logit_store,
    mean_cosine_drift,
    open_model,
    perplexity,
    pooled_outputs,
    read_text,
)
from tests.reference.encoders import save_bert, word_tokenizer
from tests.reference.language_models import divergence_of, next_logits, random_tokens
from tests.reference.tiny_models import build_llama, byte_tokenizer, save_tiny_model

CPU = torch.device("cpu")


def save_disturbed(folder, noise):
    """Return the tiny Llama with noise on its weights, as after a compression."""
    model = build_llama()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return open_model(save_tiny_model("llama", tmp_path_factory.mktemp("dense")))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return open_model(save_disturbed(tmp_path_factory.mktemp("other"), 0.05))


@pytest.fixture
def compare(tmp_path):
    """Compare two models; the scratch folder must be empty afterwards."""

    def run(before, after, text, on_step=lambda *_: None, **measured):
        scratch = tmp_path / "scratch"
        scratch.mkdir(exist_ok=True)
        how = Measurement(text=text, device=CPU, **measured)
        compared = compare_models(before, after, how, scratch=scratch, on_step=on_step)
        assert list(scratch.iterdir()) == []
        return compared

    return run


def windows_of(length, stride, tokens=40):
    return EvaluationText(windows=random_tokens(tokens).unfold(0, length, stride), length=length, stride=stride)


def test_a_model_does_not_differ_from_itself(compare, dense):
    compared = compare(dense, dense, windows_of(10, 10))

    assert compared.difference.kl_divergence == 0
    assert compared.difference.top1_agreement == 1
    assert compared.before == compared.after
    assert compared.tokens == 4 * 9


@pytest.mark.parametrize(("length", "stride"), [(8, 8), (8, 3)])
def test_the_difference_equals_token_by_token_predictions(compare, dense, other, length, stride):
    text = windows_of(length, stride, tokens=26)
    models = [load_model(folder, CPU) for folder in (dense, other)]
    divergence, agreements = [], 0
    for number, window in enumerate(text.windows.tolist()):
        new = length - 1 if number == 0 else min(stride, length - 1)
        for at in range(length - new, length):
            left, right = (next_logits(model, window[:at]) for model in models)
            divergence.append(divergence_of(left, right))
            agreements += left.index(max(left)) == right.index(max(right))

    compared = compare(dense, other, text)

    assert compared.tokens == len(divergence)
    assert compared.difference.kl_divergence == pytest.approx(math.fsum(divergence) / len(divergence), rel=1e-4)
    assert compared.difference.top1_agreement == agreements / len(divergence)
    assert 0 < agreements < len(divergence)
    for quality, model in ((compared.before, models[0]), (compared.after, models[1])):
        alone = perplexity(model, text.windows, batch_size=4, stride=stride)
        assert quality.perplexity == pytest.approx(alone.perplexity, rel=1e-5)


def test_only_one_model_is_in_memory_at_a_time(compare, dense, other, monkeypatch):
    loaded = []

    def load(folder, device):
        gc.collect()
        assert all(reference() is None for reference in loaded)
        model = load_model(folder, device)
        loaded.append(weakref.ref(model))
        return model

    monkeypatch.setattr(comparison, "load_model", load)
    compare(dense, other, windows_of(8, 8))
    assert len(loaded) == 2


def test_progress_rises_and_the_caller_can_stop(compare, dense, other):
    told = []
    compare(dense, other, windows_of(4, 1), on_step=lambda share, what: told.append((share, what)))
    assert [share for share, _ in told] == sorted(share for share, _ in told)
    assert (told[-1][0], told[-1][1]) == (1, "compressed, 37 of 37 windows")
    assert told[0][1] == "dense, 16 of 37 windows"

    class EnoughError(Exception):
        pass

    def enough(share, _what):
        if share >= 0.6:
            raise EnoughError

    with pytest.raises(EnoughError):
        compare(dense, other, windows_of(4, 1), on_step=enough)


def test_logits_that_do_not_fit_are_refused_at_the_first_window(compare, dense, other, monkeypatch):
    need = 4 * 9 * 320 * 4
    monkeypatch.setattr(logit_store, "free_disk", lambda _folder: need - 1)
    with pytest.raises(InsufficientDiskError, match="logits"):
        compare(dense, other, windows_of(10, 10))
    monkeypatch.setattr(logit_store, "free_disk", lambda _folder: need)
    compare(dense, other, windows_of(10, 10))


def test_models_with_different_vocabularies_are_not_compared(compare, dense, tmp_path):
    model = build_llama()
    model.resize_token_embeddings(330)
    model.save_pretrained(tmp_path / "wide")
    byte_tokenizer().save_pretrained(tmp_path / "wide")
    with pytest.raises(InvalidConfigError, match="320 tokens and the compressed one 330"):
        compare(dense, open_model(tmp_path / "wide"), windows_of(10, 10))


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    return tuple(open_model(save_bert(tmp_path_factory.mktemp("bert"), seed)) for seed in (0, 1))


def test_encoders_are_compared_by_drift(compare, encoders):
    text = read_text(encoders[0], ["one two\nthree\n", "four five six"], count=None)
    assert text.sentences == ("one two", "three", "four five six")

    compared = compare(*encoders, text)

    vectors = [
        pooled_outputs(load_model(encoder, CPU), word_tokenizer(), text.sentences, length=64, batch_size=1)[0]
        for encoder in encoders
    ]
    assert compared.difference.cosine_drift == pytest.approx(mean_cosine_drift(*vectors), rel=1e-4)
    assert compared.difference.kl_divergence is None
    assert compared.before.perplexity is None
    assert compared.tokens == 6 + 3 * 2
    assert compare(encoders[0], encoders[0], text).difference.cosine_drift == 0


def test_encoders_and_language_models_are_not_mixed(compare, dense, encoders):
    with pytest.raises(InvalidConfigError, match="different kinds"):
        compare(dense, encoders[0], windows_of(8, 8))
    with pytest.raises(InvalidConfigError, match="stride"):
        read_text(encoders[0], ["one"], count=1, stride=1)


@pytest.mark.parametrize("config", [ViTConfig(), T5Config()])
def test_a_model_that_does_not_suit_text_is_refused(tmp_path, config):
    config.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedArchitectureError, match="neither be evaluated on text nor healed"):
        open_model(tmp_path)
