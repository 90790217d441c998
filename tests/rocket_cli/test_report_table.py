from pathlib import Path

import pytest

from rocket_cli.report_table import common_prefix, print_report
from rocket_core.report.quality import Difference, EvaluationReport, ModelQuality, TaskScore
from rocket_core.report.schema import CompressionReport
from tests.reference.speed import model_speed, speed_report
from tests.rocket_cli.fakes import build_report


@pytest.fixture
def lines(report: CompressionReport, capsys: pytest.CaptureFixture[str]) -> list[str]:
    print_report(report, Path("out folder"))
    return capsys.readouterr().out.splitlines()


def test_the_first_line_states_the_size(lines: list[str]) -> None:
    assert lines[0].startswith("Size: 12.34 MB; was 16.00 MB, 22.9% less")


def test_each_layer_has_a_row_without_the_common_prefix(lines: list[str]) -> None:
    table = lines[2:]
    assert table[1].split() == ["layer", "kind", "rank", "nnz", "sparsity", "kept", "ratio", "weight", "error", "error"]
    # 200 atoms of 1000 features and 50,000 of 200,000 coefficients are 250,000 of a million parameters,
    # of 2 bytes each, and a mask of 25,000 bytes.
    factored = ["0.attn.q_proj", "factored", "200", "50k", "75.0%", "250k", "75.0%", "4.20", "0.1250", "0.3750"]
    assert table[2].split() == factored
    assert table[3].split() == ["0.mlp.up_proj", "dense", "-", "-", "-", "2M", "0.0%", "16.00", "-", "-"]
    assert table[4].startswith("1.attn.q_proj ")
    assert table[6].split() == ["total", "4.5M", "25.0%", "12.07"]
    assert "All layer names begin with model.layers." in lines


def test_columns_are_aligned(lines: list[str]) -> None:
    table = lines[2:9]

    assert len({len(line) for line in table}) == 1
    assert max(map(len, table)) <= 80
    for end in (len(table[0]) - 1, table[1].index("kind") - 2):
        assert table[2][end] != " "
        assert table[1][table[1].index("kind") - 1] == " "


def test_quality_before_and_after_is_shown_if_measured(
    report: CompressionReport, capsys: pytest.CaptureFixture[str], lines: list[str]
) -> None:
    assert not any("perplexity" in line for line in lines)
    score = TaskScore(task="quiz", metric="acc", value=0.5, items=4)
    evaluation = EvaluationReport(
        export="rocket",
        dataset="held.txt",
        windows=3,
        sequence_length=8,
        stride=4,
        tokens=12345,
        text_sha256="0" * 64,
        before=ModelQuality(negative_log_likelihood=1.0, perplexity=2.71828, tasks=(score,)),
        after=ModelQuality(negative_log_likelihood=800.0, tasks=(score.model_copy(update={"value": 0.25}),)),
        difference=Difference(kl_divergence=0.12345, top1_agreement=0.75),
    )

    print_report(report.model_copy(update={"evaluation": evaluation}), Path("out folder"))

    table = capsys.readouterr().out.splitlines()
    start = next(index for index, line in enumerate(table) if line.startswith("12,345 tokens of held.txt"))
    assert [line.split("  ")[0] for line in table[start + 1 : start + 5]] == [
        "perplexity",
        "KL divergence, nats per token",
        "same likeliest token",
        "quiz, acc of 4",
    ]
    rows = [line.split()[-2:] for line in table[start + 1 : start + 5]]
    assert table[start].split()[-2:] == ["original", "rocket"]
    assert table[start + 1].endswith("2.718  beyond e^709")
    assert [row[-1] for row in rows[1:]] == ["0.1235", "75.0%", "25.0%"]
    assert rows[3] == ["50.0%", "25.0%"]


def test_speed_is_shown_if_measured(
    report: CompressionReport, capsys: pytest.CaptureFixture[str], lines: list[str]
) -> None:
    assert not any("tokens/s" in line for line in lines)
    speed = speed_report(model_speed("rocket", generation_rate=75, generation_ratio=1.5))

    print_report(report.model_copy(update={"speed": speed}), Path("out folder"))

    out = capsys.readouterr().out
    table = out.splitlines()
    start = next(index for index, line in enumerate(table) if line.startswith("model "))
    assert [line.split()[0] for line in table[start + 1 : start + 3]] == ["original", "rocket"]
    assert "75 (1.50x)" in table[start + 2]
    assert "Measured in turns: prompt of 128 tokens" in table[start + 3]
    assert table[start + 4] == "Not measured: gguf: llama.cpp is not installed"


def test_skipped_layers_are_counted_by_reason(lines: list[str]) -> None:
    assert "Not compressed: 2 layers (never called)" in lines


def test_a_text_with_fewer_windows_than_requested_is_reported(lines: list[str]) -> None:
    assert "Calibrated on 1 windows, not the 256 requested: the text has no more" in lines


def test_totals_compare_the_exports_with_the_original(lines: list[str]) -> None:
    text = "\n".join(lines)

    assert "4.5M of 6M compressible ones kept, 25.0% removed (18.8% of the whole model's 8M)" in text
    assert "Took 1 min 12 s, with at most 3.50 MB of memory" in text
    assert any(line.split() == ["original", "16.00", "MB", "some/model"] for line in lines)
    assert any(line.split() == ["rocket", "12.34", "MB", "-22.9%", "out", "folder/rocket"] for line in lines)
    assert any(line.split() == ["dense", "16.00", "MB", "+0.0%", "out", "folder/dense"] for line in lines)


def test_the_snippet_is_python_that_loads_the_rocket_export(lines: list[str]) -> None:
    snippet = "\n".join(line.strip() for line in lines[lines.index("To load it and generate text:") + 1 :])

    compile(snippet, "snippet", "exec")
    assert "import rocket_core.hf" in snippet
    assert 'from_pretrained("out folder/rocket")' in snippet


def test_a_dense_export_alone_loads_without_this_library(
    report: CompressionReport, capsys: pytest.CaptureFixture[str]
) -> None:
    print_report(report.model_copy(update={"exports": report.exports[1:]}), Path("out"))

    out = capsys.readouterr().out
    assert 'from_pretrained("out/dense")' in out
    assert "rocket_core" not in out


def test_without_a_dense_export_it_says_how_to_make_one(
    report: CompressionReport, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert not any("--to dense" in line for line in lines)
    one = report.model_copy(update={"exports": report.exports[:1]})
    print_report(one, Path("out folder"))
    assert capsys.readouterr().out.endswith("    rocket export 'out folder/rocket' stock --to dense\n")
    print_report(one, Path("job_1"), fetched_by="rocket download job_1", exported_by="rocket export-job job_1")
    assert capsys.readouterr().out.endswith("    rocket export-job job_1\n")
    gguf = report.exports[0].model_copy(update={"kind": "gguf"})
    print_report(report.model_copy(update={"exports": (gguf,)}), Path("out"))
    assert "--to dense" not in capsys.readouterr().out


def test_hundreds_of_layers_are_all_printed(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(build_report(blocks=150), Path("out"))

    assert sum("_proj " in line for line in capsys.readouterr().out.splitlines()) == 300


def test_of_many_layers_the_extremes_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(build_report(blocks=10), Path("out"), all_layers=False)
    assert "--table" not in capsys.readouterr().out

    print_report(build_report(blocks=11), Path("out"), all_layers=False)

    out = capsys.readouterr().out
    rows = [line.split()[:2] for line in out.splitlines() if "_proj " in line]
    assert rows[:5] == [[f"{block}.attn.q_proj", "factored"] for block in range(5)]
    assert rows[5:] == [[f"{block}.mlp.up_proj", "dense"] for block in range(6, 11)]
    assert "--table shows all 22" in out


def test_a_narrow_terminal_loses_no_column(
    report: CompressionReport, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")

    print_report(report, Path("out"))

    assert "0.1250 0.3750" in capsys.readouterr().out


def test_brackets_in_names_are_not_markup(report: CompressionReport, capsys: pytest.CaptureFixture[str]) -> None:
    print_report(report.model_copy(update={"model": "[bold]model[/bold]"}), Path("[red]"))

    out = capsys.readouterr().out
    assert "[bold]model[/bold]" in out
    assert "[red]/rocket" in out


@pytest.mark.parametrize(
    ("names", "prefix"),
    [
        (["model.layers.0.q", "model.layers.1.q"], "model.layers."),
        (["h.1.attn", "h.10.attn"], "h."),
        (["a.q", "b.q"], ""),
        (["model.q"], "model."),
        (["q"], ""),
        (["a.b", "a.b.c"], "a."),
        ([], ""),
    ],
)
def test_the_common_prefix_ends_at_a_dot(names: list[str], prefix: str) -> None:
    assert common_prefix(names) == prefix
