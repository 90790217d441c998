import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from rocket_core.calibration.datasets import file_documents, token_windows
from rocket_core.errors import EmptyCalibrationError

ROOT = Path(__file__).parents[3]
SHARED = ROOT.parent / "shared" / "data"
STORIES = SHARED / "models" / "stories260K-hf"

UNKNOWN = "<unk>"
BOS = {"bos_token": "<s>"}
EOS = {"eos_token": "</s>"}


def word_tokenizer(**special_tokens: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of w0 … w99, with those ids, and the boundaries <s> = 100 and </s> = 101."""
    vocabulary = {f"w{number}": number for number in range(100)} | {"<s>": 100, "</s>": 101, UNKNOWN: 102}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=4, **special_tokens)


def words(*numbers: int) -> str:
    return " ".join(f"w{number}" for number in numbers)


class TestTokenWindows:
    @pytest.mark.parametrize(
        ("special_tokens", "expected"),
        [
            (BOS | EOS, [[100, 1, 2], [3, 100, 4]]),
            ({"bos_token": "w0"} | EOS, [[0, 1, 2], [3, 0, 4]]),
            (EOS, [[101, 1, 2], [3, 101, 4]]),
            ({}, [[1, 2, 3]]),
        ],
        ids=["bos", "bos numbered 0", "eos", "neither"],
    )
    def test_documents_are_joined_by_a_boundary_and_cut(self, special_tokens, expected):
        windows = token_windows([words(1, 2, 3), words(4, 5)], word_tokenizer(**special_tokens), count=9, length=3)
        assert windows.tolist() == expected
        assert windows.dtype == torch.int64

    def test_other_special_tokens_are_left_out(self):
        tokenizer = word_tokenizer(**BOS, **EOS)
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 100), ("</s>", 101)]
        )
        assert tokenizer("w1")["input_ids"] == [100, 1, 101]
        assert token_windows(["w1", "w2"], tokenizer, count=1, length=4).tolist() == [[100, 1, 100, 2]]

    def test_reading_stops_once_there_is_enough(self):
        def texts() -> Iterator[str]:
            yield words(1, 2, 3)
            yield words(4, 5, 6)
            pytest.fail("read on although two windows were full")

        windows = token_windows(texts(), word_tokenizer(**BOS), count=2, length=4)
        assert windows.tolist() == [[100, 1, 2, 3], [100, 4, 5, 6]]

    def test_without_a_count_all_windows_are_taken(self):
        assert token_windows([words(*range(10))], word_tokenizer(), count=None, length=3).tolist() == [
            [0, 1, 2],
            [3, 4, 5],
            [6, 7, 8],
        ]

    def test_too_little_text_is_refused_with_both_numbers(self):
        with pytest.raises(EmptyCalibrationError, match=r"has 3 tokens, one window needs 4"):
            token_windows(["", words(1, 2)], word_tokenizer(**BOS), count=2, length=4)

    def test_empty_text_is_refused(self):
        with pytest.raises(EmptyCalibrationError, match="has 0 tokens"):
            token_windows([], word_tokenizer(), count=None, length=1)

    def test_a_document_beyond_the_models_context_causes_no_warning(self):
        messages: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
        logger = logging.getLogger("transformers")
        logger.addHandler(handler)
        try:
            tokenizer = word_tokenizer()
            tokenizer.deprecation_warnings.clear()
            token_windows([words(*range(50))], tokenizer, count=1, length=4)
            assert messages == []
            tokenizer(words(*range(50)))
            assert "longer than the specified maximum" in messages[0]
        finally:
            logger.removeHandler(handler)

    @given(
        lengths=st.lists(st.integers(0, 9), max_size=8),
        count=st.one_of(st.none(), st.integers(1, 12)),
        length=st.integers(1, 6),
    )
    def test_windows_are_a_prefix_of_the_concatenation(self, lengths: list[int], count: int | None, length: int):
        numbers = iter(range(100))
        texts = [[next(numbers) for _ in range(size)] for size in lengths]
        whole = [token for text in texts if text for token in (100, *text)]
        expected = [whole[start : start + length] for start in range(0, len(whole) - length + 1, length)][:count]
        arguments = ([words(*text) for text in texts], word_tokenizer(**BOS))
        if expected:
            assert token_windows(*arguments, count=count, length=length).tolist() == expected
        else:
            with pytest.raises(EmptyCalibrationError):
                token_windows(*arguments, count=count, length=length)


@pytest.mark.skipif(not STORIES.exists(), reason="needs the shared test data")
def test_windows_of_stories_have_the_known_perplexity():
    tokenizer = AutoTokenizer.from_pretrained(STORIES)
    model = AutoModelForCausalLM.from_pretrained(STORIES)
    texts = file_documents(SHARED / "text" / "tinystories_val.jsonl")
    windows = token_windows(texts, tokenizer, count=96, length=256)
    assert windows.shape == (96, 256)
    with torch.inference_mode():
        losses = [model(batch, labels=batch).loss for batch in windows.split(16)]
    assert torch.stack(losses).mean().exp().item() == pytest.approx(3.805, abs=5e-4)
