"""Models that read images, for llama.cpp: a compressed text model, and the tower next to it as it is."""

from functools import cache

import pytest
import torch
from transformers import AutoModelForImageTextToText

from rocket_core.errors import InvalidConfigError, UnsupportedArchitectureError
from rocket_core.exports.conversion import export_artifact
from rocket_core.pipeline import compress
from tests.reference import gguf_vision
from tests.reference.gguf_vision import greedy, image_inputs, picture
from tests.reference.llama_cpp import Engine
from tests.reference.tiny_vision import save_tiny_vision

gguf = pytest.importorskip("gguf")
FAMILIES = ["gemma3", "smolvlm"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return folder and tokenizer of a random model, made once."""

    @cache
    def make(family):
        folder = tmp_path_factory.mktemp("models") / family
        return folder, gguf_vision.save(family, folder)[1]

    return make


@pytest.fixture(scope="module")
def smaller(tmp_path_factory, model, settings):
    """Return size, output and report of a run of a family to two thirds of its bytes, made once."""

    @cache
    def run(family):
        folder, _ = model(family)
        size = round(0.65 * (folder / "model.safetensors").stat().st_size)
        config = settings(
            ratio=None,
            target_bytes=size,
            preset="fast",
            sensitivity_samples=4,
            engine="llama.cpp",
            export=("gguf", "dense"),
            evaluate={"samples": 4, "sequence_length": 32},
        )
        output = tmp_path_factory.mktemp("out")
        return size, output, compress(str(folder), output, config)

    return run


@pytest.mark.parametrize("family", FAMILIES)
class TestEveryFamily:
    def test_both_files_take_the_size_asked_for(self, family, smaller):
        size, output, report = smaller(family)
        sizes = [(output / "gguf" / name).stat().st_size for name in ("model.gguf", "mmproj.gguf")]
        assert 0.97 * size < sum(sizes) <= size
        assert {export.kind: export.stored_bytes for export in report.exports}["gguf"] == sum(sizes)
        assert (output / "gguf" / "Modelfile").read_text() == "FROM ./model.gguf\nFROM ./mmproj.gguf\n"

    def test_the_run_tries_llama_cpp(self, family, smaller):
        loading = next(export.loading for export in smaller(family)[2].exports if export.kind == "gguf")
        print(loading)
        assert loading.fault is None

    def test_the_evaluation_reads_the_text_model(self, family, smaller):
        report = smaller(family)[2]
        print(report.evaluation)
        assert report.evaluation.export == "gguf"
