"""Measures that figures can be coloured by."""

from rocket_core.report.figures import allocation_map
from tests.reference.reports import layer_named


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
