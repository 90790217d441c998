import math

import pytest

from rocket_core.report.formatting import (
    age_text,
    bytes_text,
    clock_text,
    count_text,
    duration_text,
    kwh_text,
    percent_text,
    progress_text,
)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (999, "999 bytes"),
        (1000, "1.00 kB"),
        (5_490_000, "5.49 MB"),
        (999_994, "999.99 kB"),
        (999_995, "1.00 MB"),
        (123_456_789_012, "123.46 GB"),
        (2 * 10**18, "2,000.00 PB"),
    ],
)
def test_sizes_have_decimal_units(size: int, text: str) -> None:
    assert bytes_text(size) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1k"),
        (12_345, "12.3k"),
        (999_499, "999k"),
        (999_999, "1M"),
        (1_240_000, "1.24M"),
        (7_612_000_000, "7.61B"),
    ],
)
def test_counts_are_short(count: int, text: str) -> None:
    assert count_text(count) == text


@pytest.mark.parametrize(
    ("fraction", "sign", "text"), [(0.305, "-", "30.5%"), (0.1, "+", "+10.0%"), (-0.229, "-", "-22.9%")]
)
def test_percentages_have_one_decimal(fraction: float, sign: str, text: str) -> None:
    assert percent_text(fraction, sign) == text


@pytest.mark.parametrize(
    ("fraction", "text"), [(0, "0%"), (0.999, "99%"), (1, "100%"), (1 + 1e-9, "100%"), (-math.ulp(0), "0%")]
)
def test_hundred_per_cent_means_done(fraction: float, text: str) -> None:
    assert progress_text(fraction) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((0.042, "0.042 s"), (7.31, "7.31 s"), (61.0, "1 min 01 s")),
        *((59.94, "59.9 s"), (59.96, "1 min"), (300, "5 min"), (3600.0 * 3 + 300, "3 h 05 min")),
    ],
)
def test_durations_have_units(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (6.2, "0:07"), (760, "12:40"), (3600 * 3 + 300, "3:05:00"), (360_000, "100:00:00")],
)
def test_time_left_is_that_of_a_clock(seconds: float, text: str) -> None:
    assert clock_text(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-3, "0s"), (0.9, "0s"), (59, "59s"), (60, "1m"), (7199, "1h"), (90_000, "1d")]
)
def test_age_is_told_in_its_largest_unit(seconds, text):
    assert age_text(seconds) == text


def test_energies_have_three_digits() -> None:
    assert [kwh_text(kwh) for kwh in (3.42e-6, 0.0765, 7.88)] == ["0.00342 Wh", "76.5 Wh", "7.88 kWh"]
