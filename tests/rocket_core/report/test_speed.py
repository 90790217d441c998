import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rocket_core.report.speed import SpeedReport, median_ratio, speed_rows
from tests.reference.speed import model_speed, speed_report

SECONDS = st.floats(1e-3, 1e3)


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=9))
def test_the_ratio_is_the_middle_one_of_the_rounds(rounds):
    """Half of the rounds have a ratio that is at most the median, and half one that is at least that."""
    reference, other = zip(*rounds, strict=True)

    median = median_ratio(list(reference), list(other))

    quotients = [one / two for one, two in rounds]
    assert 2 * sum(quotient <= median for quotient in quotients) >= len(quotients)
    assert 2 * sum(quotient >= median for quotient in quotients) >= len(quotients)


def test_a_slow_round_does_not_change_the_ratio():
    """A busy machine slows both models in one round, and the medians of each alone would be off."""
    assert median_ratio([2.0, 20.0, 2.2], [1.0, 10.0, 1.1]) == pytest.approx(2)


def test_rows_have_figures_and_ratios():
    artifact = model_speed(
        "artifact",
        form="rocket",
        packing="packed",
        stored_bytes=1_000_000,
        memory_bytes=5_000_000,
        prompt_rate=617.25,
        generation_rate=75,
        prompt_ratio=0.5,
        generation_ratio=1.5,
    )

    _, row = speed_rows(speed_report(artifact))

    assert row == (
        "artifact, packed",
        "1.00 MB (0.25x)",
        "5.00 MB (0.50x)",
        "617 (0.50x)",
        "75 (1.50x)",
        "transformers, bfloat16, cpu",
    )


@pytest.mark.parametrize(("rate", "text"), [(12345.6, "12,346"), (100, "100"), (99.94, "99.9"), (0.01234, "0.0123")])
def test_rates_have_three_digits_or_are_whole(rate, text):
    (row,) = speed_rows(speed_report(models=(model_speed(prompt_rate=rate),)))

    assert row[3] == f"{text} (1.00x)"


def test_unknown_memory_is_a_dash():
    report = speed_report(model_speed("file", form="gguf", runtime="llama.cpp", dtype=None, memory_bytes=None))

    assert speed_rows(report)[1][2] == "-"
    assert speed_rows(report)[1][-1] == "llama.cpp, cpu"


def test_conditions_name_threads_and_rounds():
    assert "2 threads of a processor; medians of 5 rounds" in speed_report().conditions
    assert "1 thread of a processor; medians of 1 round" in speed_report(threads=1, rounds=1).conditions


def test_the_first_model_is_the_reference():
    with pytest.raises(ValidationError, match="its ratios are 1"):
        speed_report(models=(model_speed(prompt_ratio=0.9),))


def test_a_report_survives_json():
    report = speed_report(model_speed("other", prompt_ratio=2))

    assert SpeedReport.model_validate(json.loads(report.model_dump_json())) == report
