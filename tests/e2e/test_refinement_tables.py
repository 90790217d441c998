"""Tables that `benchmarks.refinement` makes of its runs."""

import pytest

from benchmarks.measured_runs import Results
from benchmarks.refinement import PRESETS, SIZES, bars, row_name, table
from rocket_core.config import compression_config

[FACTORED_03, FACTORED_05, BYTES_02, _] = SIZES


def row(preset, size, kl, *, seed=0, seconds=10.0):
    name = row_name(preset, size)
    return {"name": name, "seed": seed, "fraction": 0.2, "excess": 0.1, "kl": kl, "cpu_seconds": seconds}


@pytest.fixture
def results():
    return Results(
        [
            row("best", FACTORED_03, 0.5),
            row("max", FACTORED_03, 0.45, seconds=30.0),
            row("best", BYTES_02, 0.2),
            row("best", BYTES_02, 0.4, seed=1),
            row("max", BYTES_02, 0.18, seconds=50.0),
            row("max", BYTES_02, 0.32, seed=1, seconds=50.0),
        ]
    )


def test_the_table_has_parts_of_best(results):
    lines = list(table(results))
    assert "| max, 0.2 of the bytes | 0.2 ± 0 | 0.25 ± 0.07 | 0.85 ± 0.05 | 0.1 ± 0 | 50 ± 0 |" in lines
    assert "| best, factored, 0.3 of the parameters | 0.2 | 0.5 |  | 0.1 | 10 |" in lines
    assert len(lines) == 6
    assert len({line.count("|") for line in lines}) == 1


def test_requirements_are_of_sizes_that_have_one(results):
    lines = list(bars(results))
    assert "| KL, 0.2 of the bytes | at most 0.75 | 0.85 ± 0.05 | missed |" in lines
    assert "| CPU time, all sizes | at most 4 | 4.333 ± 1 | missed |" in lines
    assert len(lines) == 4


def test_every_run_is_of_settings_that_exist():
    for preset in PRESETS:
        for size in SIZES:
            assert compression_config(preset=preset, **size.settings).refine == (preset == "max")
