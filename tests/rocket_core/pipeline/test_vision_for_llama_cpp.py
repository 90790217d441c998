"""Models that read images, for llama.cpp: a compressed text model, and the tower next to it as it is."""

from functools import cache

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from rocket_core.errors import InvalidConfigError, UnsupportedArchitectureError
from rocket_core.evaluation import load_model, open_gguf, open_model
from rocket_core.exports.conversion import export_artifact
from rocket_core.pipeline import compress
from rocket_core.report.run_commands import run_commands
from rocket_core.speed import find_subject
from tests.reference import gguf_vision
from tests.reference.gguf_vision import image_inputs, log_probabilities, picture
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


def tensors_of(path):
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("family", FAMILIES)
class TestEveryFamily:
    def test_both_files_take_the_size_asked_for(self, family, smaller):
        size, output, report = smaller(family)
        sizes = [(output / "gguf" / name).stat().st_size for name in ("model.gguf", "mmproj.gguf")]
        assert 0.97 * size < sum(sizes) <= size
        assert {export.kind: export.stored_bytes for export in report.exports}["gguf"] == sum(sizes)

    def test_llama_cpp_sees_images_as_the_weights_do(self, family, smaller, model):
        output, tokenizer = smaller(family)[1], model(family)[1]
        dense = AutoModelForImageTextToText.from_pretrained(output / "dense", dtype=torch.float32)
        engine = Engine(output / "gguf" / "model.gguf", projector=output / "gguf" / "mmproj.gguf")
        pixels, file = picture(1)
        inside, images = image_inputs(family, pixels)
        before, after = tokenizer("A picture:")["input_ids"], tokenizer(" It is", add_special_tokens=False)["input_ids"]
        tokens, chances = engine.greedy(engine.prompt("A picture:", file, " It is"), 4)
        found = log_probabilities(dense, [*before, *inside, *after, *tokens], images)[-5:-1]
        # It rounds inputs of layers to 8 bits.
        assert chances == pytest.approx(found.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist(), abs=0.1)
        assert found.amax(dim=1).tolist() == pytest.approx(chances, abs=0.1)

    def test_the_tower_is_kept(self, family, smaller, model):
        output, report = smaller(family)[1:]
        original = load_file(model(family)[0] / "model.safetensors")
        key = next(key for key in original if key.endswith("encoder.layers.1.mlp.fc1.weight"))
        written = tensors_of(output / "gguf" / "mmproj.gguf")["v.blk.1.ffn_up.weight"].data
        assert torch.equal(torch.from_numpy(written.copy()), original[key])
        assert not [group for group in report.tensors if group.fate == "left out"]

    def test_the_evaluation_reads_the_text_model(self, family, smaller, model):
        output, report = smaller(family)[1:]
        assert report.evaluation.export == "gguf"
        assert 0 < report.evaluation.difference.kl_divergence < 0.1
        read = load_model(open_gguf(output / "gguf", open_model(model(family)[0])), torch.device("cpu"))
        dense = AutoModelForImageTextToText.from_pretrained(output / "dense", dtype=torch.float32)
        ids = torch.arange(300, 330)[None]
        with torch.no_grad():
            torch.testing.assert_close(read(ids).logits, dense(ids).logits, rtol=0, atol=1e-4)

    def test_the_run_generates_in_llama_cpp(self, family, smaller):
        pytest.importorskip("xllamacpp", reason="llama.cpp is needed: pip install xllamacpp")
        report = smaller(family)[2]
        loading = next(export.loading for export in report.exports if export.kind == "gguf")
        assert loading.fault is None
        assert loading.kl_divergence < 0.01
        assert loading.splits_alike

    def test_commands_name_both_files(self, family, smaller):
        _, output, report = smaller(family)
        assert find_subject(output / "gguf", "it").path == output / "gguf" / "model.gguf"
        text = run_commands(report, "gguf", "here")[0].text
        assert text.count("-m here/model.gguf --mmproj here/mmproj.gguf") == 2


def test_a_stored_artifact_becomes_both_files(model, settings, tmp_path):
    compress(str(model("smolvlm")[0]), tmp_path / "out", settings(ratio=None, method="rtn", code_bits=4))
    made = export_artifact(tmp_path / "out" / "rocket", tmp_path / "later", "gguf")
    sizes = {file.name: file.stat().st_size for file in (tmp_path / "later").glob("*.gguf")}
    assert sizes.keys() == {"model.gguf", "mmproj.gguf"}
    assert made.stored_bytes == sum(sizes.values())
    assert tensors_of(tmp_path / "later" / "model.gguf")["blk.0.ffn_up.weight"].tensor_type.name == "Q4_0"


def test_other_families_are_refused(settings, tmp_path):
    save_tiny_vision("llava", tmp_path / "llava")
    config = settings(ratio=None, bits=6, preset="fast", engine="llama.cpp")
    with pytest.raises(UnsupportedArchitectureError, match=r"LlavaForConditional.*Gemma3ForConditional.*SmolVLM"):
        compress(str(tmp_path / "llava"), tmp_path / "out", config)


def test_the_tower_is_not_compressed(settings):
    with pytest.raises(InvalidConfigError, match=r"llama\.cpp reads no compressed vision tower"):
        settings(ratio=None, bits=6, engine="llama.cpp", include=("vision",))
