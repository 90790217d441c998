"""Maps of layers and experts: measures, combined experts, and marks of a job that runs."""

import pytest

from rocket_core.candidates import Candidate
from rocket_core.report.figures import report_figures
from rocket_core.report.layer_maps import allocation_map, expert_map, running_map
from tests.reference.reports import layer_named, report_of_layers

ROUTED = {"0.0": 30, "0.1": 10, "1.0": 0, "1.1": 40}
PROJECTIONS = ("gate_proj", "down_proj")
CHOSEN = Candidate(
    kind="sparse", nnz=10, kept_parameters=10, stored_bytes=40, reconstruction_error=0.1, weight_error=0.1
)


def layers_of(**changes):
    """Return an attention layer and two experts for each of two blocks; the second block's down_proj differ."""
    found = []
    for block in range(2):
        found.append(layer_named(f"model.layers.{block}.self_attn.q_proj"))
        for expert in range(2):
            for projection in PROJECTIONS:
                layer = layer_named(f"model.layers.{block}.mlp.experts.{expert}.{projection}")
                more = {"kept_parameters": layer.kept_parameters // (expert + 1), "stored_bytes": 100 * (expert + 1)}
                routed = {"routed_tokens": ROUTED[f"{block}.{expert}"]}
                found.append(layer.model_copy(update=more | routed | changes))
    return found


def test_each_expert_is_a_row_with_its_part_of_the_tokens():
    layers = layers_of()
    rows = {(row["block"], row["expert"]): row for row in expert_map(layers).rows}
    assert {place: row["routed_tokens"] for place, row in rows.items()} == {
        ("0", "0"): 30,
        ("0", "1"): 10,
        ("1", "0"): 0,
        ("1", "1"): 40,
    }
    assert [row["share"] for row in rows.values()] == [0.75, 0.25, 0, 1]
    first = [layer for layer in layers if "layers.0.mlp.experts.0." in layer.name]
    weights = sum(layer.d_in * layer.d_out for layer in first)
    row = rows["0", "0"]
    assert row["kept_fraction"] == pytest.approx(sum(layer.kept_parameters for layer in first) / weights)
    assert row["bits_per_weight"] == pytest.approx(8 * 200 / weights)
    assert row["error"] ** 2 == pytest.approx(sum(layer.achieved_error**2 for layer in first) / 2)


def test_experts_without_tokens_are_counted():
    assert "1 of 4 experts got none" in expert_map(layers_of()).note
    assert "none" not in expert_map(layers_of(routed_tokens=1)).note


def test_losses_are_summed_where_they_are_known():
    assert all(row["loss"] == pytest.approx(0.5) for row in expert_map(layers_of(loss=0.25)).rows)
    assert "loss" not in expert_map(layers_of(loss=None)).measures


def test_the_map_of_layers_combines_the_experts_of_a_block():
    layers = layers_of()
    figure = allocation_map(layers)
    assert [(row["block"], row["projection"]) for row in figure.rows] == [
        (block, name)
        for block in ("0", "1")
        for name in ("self_attn.q_proj", "mlp.experts.*.gate_proj", "mlp.experts.*.down_proj")
    ]
    combined = figure.rows[1]
    one, other = (layer for layer in layers if "layers.0." in layer.name and "gate_proj" in layer.name)
    assert combined["stored_bytes"] == one.stored_bytes + other.stored_bytes
    total = one.d_in * one.d_out + other.d_in * other.d_out
    assert combined["kept_fraction"] == pytest.approx((one.kept_parameters + other.kept_parameters) / total)
    assert combined["layer"] == "2 experts, model.layers.0.mlp.experts.*.gate_proj"
    assert "combined" in figure.note


def test_other_models_have_no_figure_of_experts():
    report = report_of_layers()
    assert expert_map(report.layers) is None
    assert "expert-map" not in [figure.name for figure in report_figures(report)]
    assert "combined" not in report_figures(report)[0].note


def test_every_measure_has_a_column_and_a_value():
    layers = [layer_named(f"model.layers.{block}.mlp.up_proj") for block in range(2)]
    figure = allocation_map(layers)
    columns = {column.name: column for column in figure.columns}
    assert set(figure.measures) <= set(columns)
    assert {"kind", "kept_fraction", "stored_bytes", "error"} <= set(figure.measures)
    for name in figure.measures:
        assert any(row[name] is not None for row in figure.rows)
    assert [row["stored_bytes"] for row in figure.rows] == [layer.stored_bytes for layer in layers]


def test_a_measure_that_no_layer_has_is_not_offered():
    unknown = {"rank": None, "sparsity": None, "loss": None}
    layers = [layer_named("model.layers.0.x").model_copy(update=unknown)]
    assert {"rank", "sparsity", "loss"}.isdisjoint(allocation_map(layers).measures)
    known = [layer.model_copy(update={"loss": 0.5}) for layer in layers]
    assert "loss" in allocation_map(known).measures


def test_the_usual_measure_is_bits_if_there_are_codes():
    layer = layer_named("model.layers.0.x").model_copy(update={"kind": "sparse"})
    assert allocation_map([layer]).measures[0] == "kept_fraction"
    coded = layer.model_copy(update={"kind": "quantized", "bits_per_weight": 4.5})
    assert allocation_map([layer, coded]).measures[0] == "bits_per_weight"


def test_tables_are_in_no_block():
    names = ["model.layers.0.mlp.up_proj", "model.embed_tokens", "lm_head"]
    rows = allocation_map(layer_named(name) for name in names).rows
    assert [(row["block"], row["projection"]) for row in rows] == [
        ("0", "mlp.up_proj"),
        ("", "model.embed_tokens"),
        ("", "lm_head"),
    ]


def marked(names, compressed):
    figure = running_map([(layer_named(name), CHOSEN) for name in names], compressed=compressed)
    return [row.get("compressed") for row in figure.rows], "thick border" in figure.note


def test_the_first_layers_are_marked():
    names = [f"model.layers.{block}.self_attn.{name}" for block in (0, 1) for name in ("q", "k")]
    assert marked(names, 0) == ([None] * 4, False)
    assert marked(names, 3) == ([True, True, True, False], True)
    assert marked(names, 4) == ([True] * 4, True)
