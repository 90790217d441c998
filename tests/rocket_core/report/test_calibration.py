"""What calibration data reach of a model, in words."""

import pytest

from rocket_core.report.calibrated_text import CalibratedText
from rocket_core.report.calibration import CalibrationReport

ADVICE = "Languages, code or chats that they lack may lose more: add some of each"
TEXT = CalibratedText(tokens=9, negative_log_likelihood=2.0, entropy=1.9)


def reported(**known):
    usual = {"dataset": "mine", "samples": 1, "sequence_length": 2, "seed": 0, "tokens": 2, "token_sha256": "0" * 64}
    return CalibrationReport(**usual, **known)


@pytest.mark.parametrize(
    ("known", "experts", "said"),
    [
        ({}, [], "The calibration data have 1,024 of the 4,096 known tokens (25.0%)"),
        (
            {"text": TEXT},
            [5, 0, 1, 0],
            "The calibration data have 1,024 of the 4,096 known tokens (25.0%), reach 2 of 4 experts and have a "
            "perplexity of 7.39, where the model itself expects 6.69",
        ),
    ],
)
def test_what_is_reached_is_said_in_a_sentence(known, experts, said):
    report = reported(reached_tokens=1024, vocabulary=4096, **known)
    assert report.reach(experts) == f"{said}. {ADVICE}"


def test_nothing_is_said_of_data_without_tokens():
    assert reported().reach([1, 2]) is None
