"""What `benchmarks.quality` makes of its runs."""

import pytest

from benchmarks.quality import Results, comparison, plot, table


def row(variant, quality, *, ratio=0.5, seed=0, measure="perplexity over dense", seconds=10.0):
    made = {"variant": variant, "ratio": ratio, "budget": "bytes", "seed": seed}
    if quality is None:
        return made | {"infeasible": "no"}
    return made | {"quality": quality, "measure": measure, "cpu_seconds": seconds}


@pytest.fixture
def results():
    return Results(
        [
            row("paper", 2.0),
            row("best", 1.1, seconds=25.0),
            row("best", 1.3, seed=1, seconds=45.0),
            row("svd-llm", 3.0),
            row("wanda", 1.4),
            row("cospadi", None),
        ]
    )


def test_the_table_has_means_and_spreads(results):
    lines = list(table(results, "bytes"))
    assert "| best | 1.2 ± 0.1 | 35 |" in lines
    assert "| paper | 2 | 10 |" in lines
    assert "| cospadi | out of reach |  |" in lines


def test_excess_is_compared_with_the_papers_and_with_the_best_baseline(results):
    lines = list(comparison(results, "bytes"))
    assert "| best, of paper's | 0.2 | 3.5 |" in lines
    assert "| best, of the best baseline's | 0.5 (wanda) | |" in lines
    assert not any("fast" in line for line in lines)


def test_drift_is_an_excess_itself():
    results = Results([row("paper", 0.2, measure="drift"), row("best", 0.05, measure="drift")])
    assert "| best, of paper's | 0.25 | 1 |" in list(comparison(results, "bytes"))


def test_equal_runs_draw_equal_plots(results, tmp_path):
    for name in ("one.svg", "two.svg"):
        plot(results, "bytes", tmp_path / name)
    drawn = (tmp_path / "one.svg").read_text()
    assert drawn == (tmp_path / "two.svg").read_text()
    for text in ("best", "wanda", "compression ratio (bytes)"):
        assert f">{text}<" in drawn
