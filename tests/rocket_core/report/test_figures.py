"""Figures as data: rows that match the report, whatever the names of layers are."""

import csv
import io

import pytest

from rocket_core.candidates import SizePoint
from rocket_core.report.figures import (
    MeasuredModel,
    allocation_difference,
    quality_over_size,
    report_figures,
    size_frontier,
)
from rocket_core.report.layer_maps import allocation_map
from rocket_core.report.quality import Difference, EvaluationReport, ModelQuality
from tests.reference.reports import layer_named, report_of_layers


def places(names):
    return [(row["block"], row["projection"]) for row in allocation_map(layer_named(name) for name in names).rows]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (
            ["model.layers.0.self_attn.q_proj", "model.layers.11.mlp.up_proj"],
            [("0", "self_attn.q_proj"), ("11", "mlp.up_proj")],
        ),
        (
            ["model.encoder.layers.0.fc1", "model.decoder.layers.0.fc1"],
            [("encoder 0", "fc1"), ("decoder 0", "fc1")],
        ),
        (["encoder.block.3.layer.0.SelfAttention.q"], [("3", "layer.0.SelfAttention.q")]),
        (["pooler"], [("", "pooler")]),
    ],
)
def test_a_layer_name_has_a_block_and_a_projection(names, expected):
    assert places(names) == expected


def test_a_map_has_every_layer_once():
    report = report_of_layers()
    rows = allocation_map(report.layers).rows
    assert [row["layer"] for row in rows] == [layer.name for layer in report.layers]
    for row, layer in zip(rows, report.layers, strict=True):
        assert row["kept_fraction"] == pytest.approx(1 - layer.compression_ratio)
        assert row["rank"] == layer.rank


def test_the_csv_has_the_drawn_data():
    for figure in report_figures(report_of_layers()):
        rows = list(csv.DictReader(io.StringIO(figure.csv())))
        names = [column.name for column in figure.columns]
        assert len(rows) == len(figure.rows)
        for written, row in zip(rows, figure.rows, strict=True):
            for name in names:
                assert written[name] == ("" if row[name] is None else str(row[name]))


def test_names_cannot_become_spreadsheet_formulas():
    figure = allocation_map([layer_named("=HYPERLINK(1)")])
    assert "'=HYPERLINK(1)" in figure.csv()


def test_only_layers_common_to_all_jobs_are_compared():
    one, other = [layer_named("a.0.x"), layer_named("a.0.y")], [layer_named("a.0.y")]
    rows = allocation_difference([("one", one), ("other", other)]).rows
    assert [(row["layer"], row["job"]) for row in rows] == [("a.0.y", "one"), ("a.0.y", "other")]
    assert allocation_difference([]).rows == ()


CODED = {"kind": "quantized", "bits_per_weight": 4.5}


def test_layers_of_codes_are_told_apart_by_bits():
    kept, coded = layer_named("a.0.x"), layer_named("a.0.x").model_copy(update=CODED)
    report = report_of_layers()
    layers = [layer.model_copy(update=CODED) for layer in report.layers]
    for by, compared, changed in (
        ("kept_fraction", kept, report),
        ("bits_per_weight", coded, report.model_copy(update={"layers": tuple(layers)})),
    ):
        figure = next(figure for figure in report_figures(changed) if figure.name == "errors-by-size")
        for drawn in (figure, allocation_difference([("one", [compared]), ("other", [compared])])):
            assert drawn.options == {"by": by}
            assert {row[by] is None for row in drawn.rows} == {False}


def test_a_frontier_adds_the_size_of_the_whole_model():
    points = [
        SizePoint(ratio=0.1 * step, kept_parameters=10 - step, stored_bytes=40 - 4 * step, error=float(step))
        for step in range(3)
    ]
    figure = size_frontier(points, "fisher", other_bytes=100, marked_bytes=130)
    assert [row["model_bytes"] for row in figure.rows] == [140, 136, 132]
    assert figure.options["marked_bytes"] == 130


def measured(size, *, before=None, after=None, **difference):
    evaluation = EvaluationReport(
        export="rocket",
        dataset="builtin",
        windows=1,
        sequence_length=8,
        stride=8,
        tokens=1007,
        text_sha256="ab" * 32,
        before=ModelQuality(perplexity=before),
        after=ModelQuality(perplexity=after),
        difference=Difference(**difference),
    )
    return MeasuredModel(name=f"{size}", address=f"/{size}", stored_bytes=size, evaluation=evaluation)


def test_points_have_size_and_quality_next_to_the_original():
    figure = quality_over_size("m", [measured(9, before=4, after=5, kl_divergence=0.2), measured(7, kl_divergence=0.3)])
    assert [(row["model_bytes"], row["perplexity_ratio"], row["kl_divergence"]) for row in figure.rows] == [
        (7, None, 0.3),
        (9, 1.25, 0.2),
    ]
    assert figure.measures == ("kl_divergence", "perplexity_ratio")
    assert figure.rows[0]["text"] == "builtin, 1,007 tokens, ababab"


def test_of_an_encoder_the_drift_is_shown():
    figure = quality_over_size("m", [measured(7, cosine_drift=0.1)])
    assert figure.measures == ("cosine_drift",)
    assert [column.name for column in figure.columns] == ["name", "model_bytes", "cosine_drift", "text"]
