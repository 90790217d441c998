"""Tables that `benchmarks.quality` makes of its runs."""

import pytest

from benchmarks.quality import Results, bars, comparison, plot, table


def row(
    variant,
    quality,
    *,
    ratio=0.5,
    seed=0,
    measure="perplexity over dense",
    seconds=10.0,
    budget="bytes",
    achieved=None,
):
    made = {"variant": variant, "ratio": ratio, "budget": budget, "seed": seed}
    if quality is None:
        return made | {"infeasible": "no"}
    reached = ratio if achieved is None else achieved
    return made | {
        "quality": quality,
        "measure": measure,
        "cpu_seconds": seconds,
        "achieved": reached,
        "achieved_bytes": reached,
    }


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


def test_a_missing_run_is_not_reported_as_out_of_reach():
    lines = list(table(Results([row("paper", 2.0), row("best", 1.1), row("paper", 3.0, ratio=0.3)]), "bytes"))
    assert any(line.startswith("| best |") and "not run" in line for line in lines)
    assert not any("out of reach" in line for line in lines)


def test_variants_have_one_order_and_appear_where_they_were_run():
    results = Results([row("wanda", 1.4), row("best, without codes", 1.2), row("paper", 2.0, budget="parameters")])
    names = [[line.split(" | ")[0] for line in table(results, budget)][3:] for budget in ("bytes", "parameters")]
    assert names == [["| best, without codes", "| wanda"], ["| paper"]]


def test_excess_is_compared_with_paper_and_best_baseline(results):
    lines = list(comparison(results, "bytes"))
    assert "| best, of paper's | 0.2 | 3.5 |" in lines
    assert "| best, of the best baseline's | 0.5 (wanda) | |" in lines
    assert not any("fast" in line for line in lines)


def test_drift_is_used_as_excess():
    results = Results([row("paper", 0.2, measure="drift"), row("best", 0.05, measure="drift")])
    assert "| best, of paper's | 0.25 | 1 |" in list(comparison(results, "bytes"))


def test_bars_report_what_holds_and_what_is_missed():
    rows = [
        row("paper", 3.0, budget="parameters"),
        row("best", 1.1, budget="parameters", seconds=41.0, achieved=0.5005),
        row("best, factored only", 2.0, budget="parameters"),
        row("best", 1.5, achieved=0.4999),
        row("wanda", 1.4),
        row("svd-llm", 3.0),
    ]
    assert list(bars(Results(rows)))[2:] == [
        "| best: excess at 0.5, of `paper`'s | at most 0.1 | 0.05 | holds |",
        "| best, factored only: excess at 0.5, of `paper`'s | at most 0.333 | 0.5 | missed |",
        "| best: excess at 0.5, equal bytes, of the best baseline's (wanda) | at most 1 | 1.25 | missed |",
        "| budget exceeded, by a part of it | at most 1e-09 | 0.0002 | missed |",
        "| budget left over, of it | at most 0.002 | 0.001 | holds |",
        "| CPU time, of `paper`'s | at most 4 | 4.1 | missed |",
    ]


def test_drift_has_separate_bars():
    rows = [
        row(variant, quality, ratio=ratio, measure="drift", budget="parameters")
        for variant, quality in (("paper", 0.2), ("best", 0.06))
        for ratio in (0.3, 0.4, 0.5)
    ]
    found = [line for line in bars(Results(rows)) if "excess" in line]
    assert [line.split(" | ")[1:] for line in found] == [
        ["at most 0.25", "0.3", "missed |"],
        ["at most 0.5", "0.3", "holds |"],
    ]


def test_equal_runs_draw_equal_plots(results, tmp_path):
    for name in ("one.svg", "two.svg"):
        plot(results, "bytes", tmp_path / name)
    drawn = (tmp_path / "one.svg").read_text()
    assert drawn == (tmp_path / "two.svg").read_text()
    for text in ("best", "wanda", "compression ratio (bytes)"):
        assert f">{text}<" in drawn
