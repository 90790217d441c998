import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rocket_core.errors import CheckpointError, EmptyCalibrationError, InvalidConfigError
from rocket_core.evaluation import perplexity
from rocket_core.evaluation.windows import counted_tokens, predictions, text_windows
from tests.reference.language_models import FixedLogits, next_logits, random_tokens, random_windows, surprise_of
from tests.reference.tiny_models import build_llama, byte_tokenizer


def nll_token_by_token(model, window):
    """Return each token's surprise given the prefix before it, each computed separately in float64."""
    return [surprise_of(next_logits(model, window[:at]), window[at]) for at in range(1, len(window))]


def test_it_equals_the_mean_token_by_token_surprise() -> None:
    model = build_llama().double()
    windows = random_windows(3, 7)
    surprises = [surprise for window in windows.tolist() for surprise in nll_token_by_token(model, window)]

    result = perplexity(model, windows, batch_size=2)

    assert result.negative_log_likelihood == pytest.approx(sum(surprises) / len(surprises), rel=1e-12)
    assert result.perplexity == pytest.approx(math.exp(sum(surprises) / len(surprises)), rel=1e-12)
    assert (result.tokens, result.windows) == (3 * 6, 3)


def test_uniform_predictions_have_the_vocabulary_as_perplexity() -> None:
    result = perplexity(FixedLogits(torch.zeros(37, 37)), random_windows(5, 9, 37), batch_size=2)

    assert result.perplexity == pytest.approx(37, rel=1e-6)


def test_the_first_token_is_not_predicted_and_the_last_not_read() -> None:
    sure_of_one = torch.full((3, 3), -50.0)
    sure_of_one[:, 1] = 50.0
    sure_of_one[2] = float("nan")  # row of the token that only occurs last

    result = perplexity(FixedLogits(sure_of_one), torch.tensor([[0, 1, 1, 1]]), batch_size=1)
    assert result.perplexity == pytest.approx(1)

    result = perplexity(FixedLogits(sure_of_one), torch.tensor([[1, 1, 2]]), batch_size=1)
    assert result.negative_log_likelihood == pytest.approx(50)


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_the_batch_size_does_not_matter(batch_size: int) -> None:
    model, windows = build_llama(), random_windows(10, 16)

    result = perplexity(model, windows, batch_size=batch_size)

    assert result.perplexity == pytest.approx(perplexity(model, windows, batch_size=3).perplexity, rel=1e-5)


def test_half_precision_logits_are_summed_in_float32() -> None:
    table = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    windows = random_windows(20, 64, 64)

    result = perplexity(FixedLogits(table), windows, batch_size=4)

    exact = perplexity(FixedLogits(table.double()), windows, batch_size=4)
    assert result.negative_log_likelihood == pytest.approx(exact.negative_log_likelihood, rel=1e-6)


def test_an_infinite_perplexity_has_a_finite_loss() -> None:
    table = torch.zeros(2, 2)
    table[:, 0] = 1000.0

    result = perplexity(FixedLogits(table), torch.tensor([[0, 1, 1]]), batch_size=1)

    assert result.perplexity == math.inf
    assert result.negative_log_likelihood == pytest.approx(1000)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_logits_are_an_error_that_names_the_window(value: float) -> None:
    table = torch.zeros(4, 4)
    table[3, 2] = value

    with pytest.raises(CheckpointError, match="window 2 "):
        perplexity(FixedLogits(table), torch.tensor([[0, 1], [1, 1], [3, 1]]), batch_size=2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_bad_logit_among_many_is_found(value: float, dtype: torch.dtype) -> None:
    for place in (0, 97, 1002):
        table = torch.randn(2, 1003, dtype=torch.float64, generator=torch.Generator().manual_seed(place))
        table[1, place] = value
        with pytest.raises(CheckpointError, match="window 0 "):
            perplexity(FixedLogits(table.to(dtype)), torch.tensor([[1, 1, 0]]), batch_size=1)


def test_losses_do_not_depend_on_tokens_computed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, windows = build_llama(), random_windows(3, 12)
    whole = perplexity(model, windows, batch_size=2)
    monkeypatch.setattr("rocket_core.evaluation.likelihood.copied_bytes", lambda _device: 1)
    assert perplexity(model, windows, batch_size=2) == whole


def test_a_model_in_training_mode_is_refused() -> None:
    with pytest.raises(InvalidConfigError, match="eval"):
        perplexity(build_llama().train(), random_windows(1, 4), batch_size=1)


@pytest.mark.parametrize(("count", "length", "batch_size"), [(0, 8, 1), (2, 1, 1), (2, 8, 0)])
def test_nothing_to_predict_is_refused(count: int, length: int, batch_size: int) -> None:
    with pytest.raises(InvalidConfigError):
        perplexity(build_llama(), torch.zeros(count, length, dtype=torch.int64), batch_size=batch_size)


def test_progress_counts_windows_to_the_end() -> None:
    seen: list[tuple[int, int]] = []

    perplexity(
        build_llama(), random_windows(5, 4), batch_size=2, on_progress=lambda done, total: seen.append((done, total))
    )

    assert seen == [(2, 5), (4, 5), (5, 5)]


@pytest.mark.parametrize(("length", "stride"), [(7, 1), (7, 2), (7, 3), (7, 5), (7, 6), (7, 7), (2, 1), (2, 2)])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_overlapping_windows_predict_each_token_once(length, stride, batch_size):
    model, stream = build_llama().double(), random_tokens(29)
    windows = stream.unfold(0, length, stride)
    surprises = []
    for at in range(1, (len(windows) - 1) * stride + length):
        first = max(0, -(-(at - length + 1) // stride)) * stride
        if at > first:
            prefix = stream[first:at].tolist()
            assert len(prefix) >= min(at, length - stride)
            surprises.append(surprise_of(next_logits(model, prefix), int(stream[at])))

    result = perplexity(model, windows, batch_size=batch_size, stride=stride)

    assert result.tokens == len(surprises)
    assert result.negative_log_likelihood == pytest.approx(sum(surprises) / len(surprises), rel=1e-12)


@given(length=st.integers(2, 12), stride=st.integers(1, 12), tokens=st.integers(12, 60))
@settings(deadline=None, max_examples=60)
def test_targets_of_overlapping_windows_omit_the_first_token(length, stride, tokens):
    stride = min(stride, length)
    stream = random_tokens(tokens, 5)
    windows = stream.unfold(0, length, stride)
    covered = stream[: (len(windows) - 1) * stride + length]
    model = FixedLogits(torch.zeros(5, 5))

    targets = torch.cat([told.targets for told in predictions(model, windows, stride=stride, batch_size=4)])

    kept = torch.arange(len(covered)) % length != 0 if stride == length else torch.arange(len(covered)) > 0
    assert targets.tolist() == covered[kept].tolist()
    assert len(targets) == counted_tokens(len(windows), length, stride)


def test_logits_of_a_token_are_those_before_it_is_read():
    model = FixedLogits(torch.diag(torch.arange(9.0)))
    windows = torch.arange(9).unfold(0, 4, 2)
    for told in predictions(model, windows, stride=2, batch_size=2):
        assert told.logits.argmax(-1).tolist() == (told.targets - 1).tolist()


def test_the_default_stride_is_a_whole_window():
    model, windows = build_llama(), random_windows(4, 9)

    assert perplexity(model, windows, batch_size=2, stride=9) == perplexity(model, windows, batch_size=2)


@pytest.mark.parametrize("stride", [0, -1, 9])
def test_a_stride_that_skips_tokens_is_refused(stride):
    with pytest.raises(InvalidConfigError, match="stride"):
        perplexity(build_llama(), random_windows(2, 8), batch_size=1, stride=stride)
    with pytest.raises(InvalidConfigError, match="stride"):
        text_windows(["some text"], byte_tokenizer(), count=1, length=8, stride=stride)


def test_windows_overlap_and_have_the_requested_count():
    texts = ["one text", "and another one"]
    whole = text_windows(texts, byte_tokenizer(), count=None, length=25, stride=25)[0]

    windows = text_windows(texts, byte_tokenizer(), count=4, length=10, stride=3)

    assert windows.tolist() == [whole[start : start + 10].tolist() for start in (0, 3, 6, 9)]
    assert len(text_windows(texts, byte_tokenizer(), count=99, length=10, stride=3)) == 6


def test_only_needed_documents_are_read():
    texts = iter(["x" * 9, "y" * 9, "z" * 9])

    text_windows(texts, byte_tokenizer(), count=3, length=10, stride=4)  # 18 tokens of 20

    assert list(texts) == ["z" * 9]


def test_a_text_without_a_whole_window_is_an_error():
    with pytest.raises(EmptyCalibrationError, match="has 6 tokens, one window needs 7"):
        text_windows(["short"], byte_tokenizer(), count=1, length=7, stride=1)
