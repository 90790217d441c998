"""Drawing the figures of the method."""

import pytest

from draw_figures import _lower_hull, draw, uniform_error
from rocket_core.allocation.predictor import ModelProfile
from rocket_core.candidates import Candidate, LayerProfile


def candidate(kind, kept, loss):
    shape = {} if kind == "dense" else {"nnz": kept} if kind == "sparse" else {"rank": 1, "nnz": kept - 4}
    return Candidate(
        kind=kind, kept_parameters=kept, stored_bytes=2 * kept, reconstruction_error=loss, weight_error=loss, loss=loss,
        **shape,
    )  # fmt: skip


def layer(name, *candidates):
    dense = candidate("dense", 16, 0.0)
    return LayerProfile(name=name, d_in=4, d_out=4, input_group=name, tokens=8, candidates=(dense, *candidates))


@pytest.fixture
def predictor():
    layers = (
        layer("blocks.0.up", candidate("sparse", 12, 0.1), candidate("sparse", 8, 0.4)),
        layer("blocks.0.down", candidate("sparse", 12, 0.01), candidate("sparse", 8, 0.02)),
    )
    return ModelProfile(
        fingerprint="f", model="m", revision="r", settings={}, objective="fisher", budget_unit="parameters",
        cap_slack=0, itemsize=2, model_parameters=32, dense_bytes=64, other_bytes=0, layers=layers,
    ).predictor()  # fmt: skip


def test_equal_profiles_draw_equal_figures(predictor, tmp_path):
    alone = {"low_rank": layer("blocks.0.down", candidate("low_rank", 8, 0.3))}
    for name in ("one", "two"):
        draw(predictor, predictor.at_ratio(0.25), tmp_path / name, alone)
    drawn = {file.name: file.read_text() for file in (tmp_path / "one").iterdir()}
    assert set(drawn) == {"candidates.svg", "allocation.svg", "frontier.svg"}
    assert drawn == {file.name: file.read_text() for file in (tmp_path / "two").iterdir()}
    assert ">blocks.0.down<" in drawn["candidates.svg"]
    assert ">low-rank<" in drawn["candidates.svg"]
    assert ">50%<" in drawn["allocation.svg"]
    assert ">ratio 0.25<" in drawn["frontier.svg"]


def test_uniform_takes_each_layers_best_candidate(predictor):
    assert uniform_error(predictor.profile.layers, 0.25) == pytest.approx(0.11)
    assert uniform_error(predictor.profile.layers, 0.5) == pytest.approx(0.42)


def test_the_lower_hull_is_convex_and_decreasing():
    points = [(1, 10), (2, 8), (3, 2), (4, 1), (4, 5), (5, 3)]
    assert _lower_hull(points) == [(1, 10), (3, 2), (4, 1)]
