"""A size instead of a ratio: files are never larger, and hardly smaller."""

from types import SimpleNamespace

import pytest

from rocket_core.config import compression_config
from rocket_core.errors import InfeasibleBudgetError, InvalidConfigError
from rocket_core.pipeline import ProfileCache, compress
from rocket_core.pipeline.block_walk import BlockWalk
from rocket_core.pipeline.stages import artifact_size, profile
from rocket_core.report.schema import CompressionReport
from tests.sampling import sweep


def size_of(folder):
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@pytest.fixture
def run(tmp_path, model_folder, settings):
    count = iter(range(100))

    def make(target, family="llama", profiles=None, **changes):
        output = tmp_path / f"out{next(count)}"
        chosen = settings(ratio=None, target_bytes=target, preset="fast", sensitivity_samples=4, **changes)
        return output, compress(str(model_folder(family)), output, chosen, profiles=profiles)

    return make


@pytest.mark.parametrize(
    ("family", "part"),
    sweep([("llama", 0.5)], soak=[("llama", 0.2), ("gpt2", 0.2), ("gpt2", 0.5), ("bert", 0.2), ("bert", 0.5)]),
)
def test_factored_files_stay_just_within_the_size(run, model_folder, family, part):
    whole = size_of(model_folder(family))
    _output, report = run(whole - 1, family, include=())
    compressible = 4 * report.totals.compressible_parameters
    target = whole - round(part * compressible)
    output, report = run(target, family, include=())
    written = size_of(output / "rocket")
    # Candidates of layers this small are far apart: at most one more step would fit.
    assert 0.985 * target <= written <= target
    assert (report.settings.target_bytes, report.settings.ratio) == (target, None)
    assert report.allocation.measure == "bytes"
    assert f"target size {target:,} bytes" in (output / "rocket" / "README.md").read_text()
    assert CompressionReport.model_validate_json((output / "report.json").read_bytes()) == report


@pytest.mark.parametrize("kinds", [("low_rank", "factored"), ("shared",), ("sparse",), ("quantized",)])
def test_the_bytes_of_files_are_known_beforehand(run, model_folder, monkeypatch, kinds):
    expected = []

    def fill_and_record(run_of_pipeline, size, predictor):
        allocation = artifact_size.fill_size(run_of_pipeline, size, predictor)
        expected.append(artifact_size.artifact_bytes(run_of_pipeline, predictor.chosen(allocation)))
        return allocation

    monkeypatch.setattr(profile, "fill_size", fill_and_record)
    output, report = run(round(0.85 * size_of(model_folder("llama"))), kinds=kinds, max_shard_bytes=20_000)
    assert any(layer.kind != "dense" for layer in report.layers)
    assert expected == [size_of(output / "rocket")]


def test_entropy_coded_files_stay_just_within_the_size(run, model_folder):
    target = round(0.65 * size_of(model_folder("llama")))
    output, report = run(target, kinds=("entropy_coded",), max_shard_bytes=20_000, sequential=True)
    assert {layer.kind for layer in report.layers} >= {"entropy_coded"}
    # Streams of layers this small change by some bytes at once.
    assert 0.995 * target <= size_of(output / "rocket") <= target


def test_a_size_is_filled_although_headers_grow(monkeypatch):
    class Layers:
        """Layers that can keep any number of bytes, with 10,000 others assumed."""

        def within_bytes(self, size):
            return SimpleNamespace(budget=size - 10_000, kept=size - 10_000)

        def chosen(self, allocation):
            return allocation

    monkeypatch.setattr(artifact_size, "artifact_bytes", lambda _run, found: found.kept + 2000 + found.kept // 50)
    found = artifact_size.fill_size(None, 20_000, Layers())
    assert 19_995 <= found.kept + 2000 + found.kept // 50 <= 20_000


def test_shards_and_another_dtype_are_counted(run, model_folder):
    target = round(0.4 * size_of(model_folder("llama")))
    output, report = run(target, dtype="bfloat16", max_shard_bytes=4000)
    files = list((output / "rocket").glob("*.safetensors"))
    assert len(files) > 4
    assert 0.8 * target < size_of(output / "rocket") <= target
    assert report.exports[0].stored_bytes == size_of(output / "rocket")


def test_a_size_reuses_the_profile_of_a_ratio_of_bytes(run, tmp_path, model_folder, settings, monkeypatch):
    profile_cache = ProfileCache(tmp_path / "profiles")
    first = settings(preset="fast", sensitivity_samples=4, budget="bytes")
    compress(str(model_folder("llama")), tmp_path / "first", first, profiles=profile_cache)
    monkeypatch.setattr(BlockWalk, "statistics", lambda *_args, **_options: pytest.fail("calibrated again"))
    output, _report = run(round(0.7 * size_of(model_folder("llama"))), profiles=profile_cache)
    assert size_of(output / "rocket") <= round(0.7 * size_of(model_folder("llama")))


def test_an_unreachable_size_is_refused_before_calibration(run, model_folder, monkeypatch):
    monkeypatch.setattr(BlockWalk, "statistics", lambda *_args, **_options: pytest.fail("calibrated"))
    with pytest.raises(InfeasibleBudgetError, match="1kB is out of reach") as caught:
        run(1000)
    assert 0 < caught.value.nearest_ratio < 1


def test_an_unreachable_size_is_refused_before_reading_data(run, tmp_path):
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(InfeasibleBudgetError, match="1kB is out of reach"):
        run(1000, calibration={"dataset": str(tmp_path / "short.txt"), "samples": 64, "sequence_length": 64})


def test_without_a_target_a_compression_is_refused(tmp_path, model_folder):
    with pytest.raises(InvalidConfigError, match="specify a ratio, a target size"):
        compress(str(model_folder("llama")), tmp_path / "out", compression_config())
