"""Bits per weight instead of a ratio: the layers never take more, and hardly less."""

import json

import pytest

from rocket_core.config import compression_config
from rocket_core.errors import InfeasibleBudgetError
from rocket_core.hub.requests import check_request
from rocket_core.pipeline import ProfileCache, compress
from rocket_core.pipeline.block_walk import BlockWalk
from rocket_core.report.schema import CompressionReport
from tests.sampling import sweep


def tensors_of(folder):
    """Return the bytes of each tensor in the safetensors files, read from their headers."""
    sizes = {}
    for file in folder.glob("*.safetensors"):
        raw = file.read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        header.pop("__metadata__", None)
        sizes |= {name: entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in header.items()}
    return sizes


def bits_of(folder, report):
    """Return the stored bits of all compressible layers, and the number of their parameters."""
    sizes = tensors_of(folder)
    names = {layer.name for layer in report.layers}
    stored = {key: size for key, size in sizes.items() if any(name in f"{key}." for name in names)}
    parameters = sum(layer.d_in * layer.d_out for layer in report.layers)
    return 8 * sum(size for key, size in stored.items() if not key.endswith(".bias")), parameters


@pytest.fixture
def run(tmp_path, model_folder, settings):
    count = iter(range(100))

    def make(bits, family="llama", profiles=None, **changes):
        output = tmp_path / f"out{next(count)}"
        chosen = settings(ratio=None, bits=bits, preset="fast", sensitivity_samples=4, **changes)
        return output, compress(str(model_folder(family)), output, chosen, profiles=profiles)

    return make


@pytest.mark.parametrize(
    ("family", "bits", "changes"),
    sweep(
        [("gpt2", 3.3, {})],
        soak=[
            ("llama", 4.5, {}),
            ("bert", 8, {"dtype": "bfloat16"}),
            ("llama", 16, {"kinds": ("sparse", "low_rank", "factored")}),
        ],
    ),
)
def test_stored_layers_stay_just_within_the_bits(run, family, bits, changes):
    output, report = run(bits, family, **changes)
    stored, parameters = bits_of(output / "rocket", report)
    # Candidates of layers this small are far apart.
    assert 0.94 * bits * parameters < stored <= bits * parameters
    assert report.bits_per_weight == stored / parameters
    assert (report.settings.bits, report.settings.ratio, report.settings.target_bytes) == (bits, None, None)
    assert report.allocation.measure == "bytes"
    assert f"target {bits} bits per weight" in (output / "rocket" / "README.md").read_text()
    assert CompressionReport.model_validate_json((output / "report.json").read_bytes()) == report


def test_bits_that_the_model_has_leave_it_dense(run):
    _output, report = run(16, dtype="bfloat16")
    assert {layer.kind for layer in report.layers} == {"dense"}
    assert report.bits_per_weight == 16


def test_bits_reuse_the_profile_of_any_target_in_bytes(run, tmp_path, model_folder, settings, monkeypatch):
    profile_cache = ProfileCache(tmp_path / "profiles")
    first = settings(preset="fast", sensitivity_samples=4, budget="bytes")
    compress(str(model_folder("llama")), tmp_path / "first", first, profiles=profile_cache)
    monkeypatch.setattr(BlockWalk, "statistics", lambda *_args, **_options: pytest.fail("calibrated again"))
    for bits in (3.5, 6):
        _output, report = run(bits, profiles=profile_cache)
        assert report.bits_per_weight <= bits


def test_unreachable_bits_are_refused_before_calibration(run, model_folder, monkeypatch):
    monkeypatch.setattr(BlockWalk, "statistics", lambda *_args, **_options: pytest.fail("calibrated"))
    with pytest.raises(
        InfeasibleBudgetError, match=r"0\.5 bits per weight are out of reach: .* at least [1-4]"
    ) as caught:
        run(0.5)
    assert 0 < caught.value.nearest_ratio < 1
    with pytest.raises(InfeasibleBudgetError, match=r"0\.5 bits per weight are out of reach"):
        check_request(str(model_folder("llama")), compression_config(bits=0.5))
