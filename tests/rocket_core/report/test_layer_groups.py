import pytest

from rocket_core.report import layer_groups
from rocket_core.report.figures import report_figures
from rocket_core.report.layer_groups import MOST_LAYERS, summarize_layers, summarize_report
from rocket_core.report.layer_places import general_name
from tests.reference.reports import empty_report, layer_named

EXPERTS = 300


def mixture(blocks=3, experts=EXPERTS):
    """Return the layers of a mixture: one of attention and three for each expert in a block."""
    names = [
        f"model.layers.{block}.{name}"
        for block in range(blocks)
        for name in (
            "self_attn.q_proj",
            *(f"mlp.experts.{expert}.{part}" for expert in range(experts) for part in ("gate", "up", "down")),
        )
    ]
    return tuple(layer_named(name) for name in names)


@pytest.mark.parametrize(
    ("name", "general"),
    [
        ("model.layers.3.mlp.experts.17.up_proj", "model.layers.3.mlp.experts.*.up_proj"),
        ("model.layers.3.self_attn.q_proj", "model.layers.3.self_attn.q_proj"),
        ("lm_head", "lm_head"),
        ("h.0.1.2", "h.0.*.*"),
    ],
)
def test_names_of_experts_are_general(name, general):
    assert general_name(name) == general


def test_a_small_model_shows_every_layer():
    layers = mixture(1)
    assert summarize_layers(layers) == layers


def test_the_experts_of_a_large_mixture_become_one():
    layers = mixture()
    assert len(layers) > MOST_LAYERS
    found = summarize_layers(layers)
    assert len(found) == 3 * 4
    assert [layer.name for layer in found[:2]] == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.mlp.experts.*.gate",
    ]
    assert found[0] == layers[0]
    for total in ("stored_bytes", "kept_parameters"):
        assert sum(getattr(one, total) for one in found) == sum(getattr(one, total) for one in layers)
    experts, one = found[1], layers[1]
    assert (experts.d_in, experts.d_out, experts.routed_tokens) == (one.d_in, EXPERTS * one.d_out, None)
    assert experts.compression_ratio == pytest.approx(one.compression_ratio)
    assert experts.reconstruction_error == pytest.approx(one.reconstruction_error)


def test_layers_that_are_stored_differently_stay_apart():
    layers = [layer.model_copy(update={"bits": 4 + index % 2}) for index, layer in enumerate(mixture())]
    assert {layer.bits for layer in summarize_layers(layers) if "experts" in layer.name} == {4, 5}


def test_figures_of_a_large_mixture_are_small(monkeypatch):
    report = empty_report().model_copy(update={"layers": mixture()})
    assert all(len(figure.rows) <= 12 for figure in report_figures(report))
    # Names that have nothing in common.
    monkeypatch.setattr(layer_groups, "MOST_LAYERS", 5)
    assert len(summarize_layers(mixture(4, 1))) == 5


def test_a_summary_has_no_frontiers_and_few_skipped_layers():
    skipped = {f"model.layers.0.mlp.experts.{expert}.up": "ignored" for expert in range(9)}
    report = empty_report().model_copy(update={"layers": mixture(), "skipped": skipped})
    summary = summarize_report(report)
    assert summary.skipped == {"model.layers.0.mlp.experts.*.up": "ignored"}
    assert len(summary.layers) == 12
