from dataclasses import replace

import pytest

from rocket_core.config import compression_config
from rocket_core.estimates.evaluation_duration import EvaluationSizes, evaluation_operations
from tests.rocket_core.estimates.test_duration import LLAMA_1B, SPEED, shape

TINY = (*((192, 192), (192, 64), (192, 64), (192, 192)), (192, 512), (192, 512), (512, 192))
SETTINGS = {"max_position_embeddings": 131_072, "vocab_size": 2048}


def sizes(windows=64, length=256, **more):
    return EvaluationSizes(**{"windows": windows, "length": length, "stride": length, "vocabulary": 2048} | more)


def seconds(model, evaluation):
    return evaluation_operations(replace(model, predicts=True), evaluation).duration(SPEED)


def expected(**evaluate):
    config = compression_config(ratio=0.5, evaluate=evaluate)
    return EvaluationSizes.expected(config, replace(shape(LLAMA_1B), predicts=True), SETTINGS)


@pytest.mark.parametrize(
    ("block", "blocks", "windows", "length", "measured"),
    [(TINY, 6, 64, 256, 3.4), (LLAMA_1B, 3, 16, 1024, 112.7)],
    ids=["tiny-llama", "blocks of 1B"],
)
def test_an_evaluation_is_within_the_stated_factor(block, blocks, windows, length, measured):
    """Processor time of `evaluate_text` next to the original on one core of an Intel processor with AMX."""
    found = seconds(shape(block, blocks), sizes(windows, length))
    assert measured / 1.5 < found < 1.5 * measured


def test_time_rises_with_all_that_is_read():
    model, base = shape(LLAMA_1B), sizes()
    assert seconds(model, replace(base, windows=128)) == pytest.approx(2 * seconds(model, base), rel=0.05)
    # Windows that overlap are read as a whole, and half of their tokens are predicted.
    overlapping = seconds(model, replace(base, stride=128))
    assert 0.8 * seconds(model, base) < overlapping < seconds(model, base)
    assert seconds(model, replace(base, answer_tokens=64)) > seconds(model, base)
    assert seconds(replace(model, active_part=1 / 8), base) < 0.5 * seconds(model, base)


def test_no_more_of_a_text_is_read_than_there_is(tmp_path):
    assert expected(sequence_length=1024).windows == 11
    assert expected(sequence_length=1024, stride=512).windows == 21
    assert expected(sequence_length=1024, samples=3).windows == 3
    assert expected(dataset="wikitext2", sequence_length=1024).windows == 64
    text = tmp_path / "text.txt"
    text.write_text("four" * 1024)
    assert expected(dataset=str(text), sequence_length=1024).windows == 2
    text.write_text("four" * 1024 * 80)
    assert expected(dataset=str(text), sequence_length=1024).windows == 64
    assert expected(dataset=str(tmp_path / "absent.txt"), sequence_length=1024).windows == 64


def test_sizes_follow_the_settings():
    assert EvaluationSizes.expected(compression_config(ratio=0.5), shape(LLAMA_1B), SETTINGS) is None
    assert expected(prompts=["a", "b"], answer_tokens=7).answer_tokens == 14
    assert (expected().length, expected().stride, expected().vocabulary) == (1024, 1024, 2048)
    encoder = EvaluationSizes.expected(compression_config(ratio=0.5, evaluate={}), shape(LLAMA_1B), SETTINGS)
    assert encoder.vocabulary == 0
