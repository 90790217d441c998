"""The map of a job that runs."""

from rocket_core.candidates import Candidate
from rocket_core.report.running_map import running_map
from tests.reference.reports import layer_named

CHOSEN = Candidate(
    kind="sparse", nnz=10, kept_parameters=10, stored_bytes=40, reconstruction_error=0.1, weight_error=0.1
)


def marked(names, compressed):
    figure = running_map([(layer_named(name), CHOSEN) for name in names], compressed=compressed)
    return [row.get("compressed") for row in figure.rows], "thick border" in figure.note


def test_the_first_layers_are_marked():
    names = [f"model.layers.{block}.self_attn.{name}" for block in (0, 1) for name in ("q", "k")]
    assert marked(names, 0) == ([None] * 4, False)
    assert marked(names, 3) == ([True, True, True, False], True)
    assert marked(names, 4) == ([True] * 4, True)
