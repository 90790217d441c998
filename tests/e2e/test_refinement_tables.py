"""Tables that `benchmarks.refinement` makes of its runs."""

import pytest

from benchmarks.measured_runs import Results
from benchmarks.refinement import HEALED, STUDIES, bars, report, row_name, table
from rocket_core.config import compression_config

STORIES = STUDIES["stories"]
[FACTORED_03, FACTORED_05, BYTES_02, _] = STORIES.sizes


def row(name, size, kl, *, seed=0, seconds=10.0, **more):
    figures = {"fraction": 0.199, "excess": 0.1, "kl": kl, "cpu_seconds": seconds}
    return {"name": row_name(name, size), "seed": seed, **figures, **more}


@pytest.fixture
def results():
    return Results(
        [
            row("best", FACTORED_03, 0.5),
            row("max", FACTORED_03, 0.45, seconds=30.0),
            row("best", FACTORED_05, 1.0),
            row(HEALED, FACTORED_05, 0.3, healing_cpu_seconds=90.0),
            row("best", BYTES_02, 0.2),
            row("best", BYTES_02, 0.4, seed=1),
            row("max", BYTES_02, 0.18, seconds=50.0),
            row("max", BYTES_02, 0.32, seed=1, seconds=50.0),
        ]
    )


def test_the_table_has_parts_of_best(results):
    lines = list(table(STORIES, results))
    assert "| max, 0.2 of the bytes | 0.199 ± 0 | 0.25 ± 0.07 | 0.85 ± 0.05 | 0.1 ± 0 | 50 |" in lines
    assert "| best, factored, 0.3 of the parameters | 0.199 | 0.5 |  | 0.1 | 10 |" in lines
    assert "| best, healed, factored, 0.5 of the parameters | 0.199 | 0.3 | 0.3 | 0.1 | 10 + 90 |" in lines
    assert len(lines) == 8
    assert len({line.count("|") for line in lines}) == 1


def test_requirements_are_of_sizes_that_have_one(results):
    lines = list(bars(STORIES, results))
    assert (
        "| stories260K, 0.2 of the bytes: kl of max, of that of best | at most 0.75 | 0.85 ± 0.05 | missed |" in lines
    )
    assert [line.count("holds") for line in lines] == [1, 0, 1, 0]
    assert lines[2].startswith("| stories260K: bytes of max, exceeded by a part of them | at most 0 | -0.005 |")
    assert lines[3].startswith("| stories260K: CPU time of max, of that of best, the largest | at most 4 | 5 |")


def test_the_report_has_the_parts_that_were_run():
    rows = [{**row("best", FACTORED_05, 1.0), "part": "stories"}, {**row("max", FACTORED_05, 0.5), "part": "stories"}]
    rival = {"name": "AutoRound, 4 bits", "kl": 0.1, "fraction": 0.3, "excess": 0.1, "agreement": 0.9, "part": "rivals"}
    lines = list(report([*rows, rival]))
    assert lines[0] == "stories260K:"
    assert "AutoRound, examples/tiny-llama:" in lines
    assert not any("MiniLM" in line for line in lines)
    assert lines[-2].endswith("kl of max, of that of best | at most 0.6 | 0.5 | holds |")


@pytest.mark.parametrize("part", STUDIES)
def test_every_run_is_of_settings_that_exist(part):
    for size in STUDIES[part].sizes:
        assert size.most.keys() <= {*STUDIES[part].rows}
        for name in STUDIES[part].rows:
            preset = "best" if name == HEALED else name
            assert compression_config(preset=preset, **size.settings).refine == (preset == "max")
