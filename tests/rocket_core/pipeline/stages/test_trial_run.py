"""Written artifacts that are changed before they are published: none is."""

import json
import struct

import pytest
import torch

from rocket_core.config import WORK_FOLDER_NAME
from rocket_core.errors import CompressionCancelledError, FaultyResultError
from rocket_core.pipeline import compress
from rocket_core.pipeline.stages.healing.files import check_healed
from tests.reference.observers import Watch
from tests.reference.tiny_mixtures import save_tiny_mixture

CASES = {
    "sparse": ("llama", {"kinds": ("sparse",)}, "up_proj.weight"),
    "dictionary": ("llama", {"kinds": ("factored",)}, "weight_u"),
    "codes": ("llama", {"method": "rtn", "ratio": None}, "down_proj.weight"),
    "scales": ("llama", {"method": "rtn", "ratio": None}, "down_proj.weight_scale"),
    "entropy coded": ("llama", {"bits": 4.0, "ratio": None, "preset": "fast"}, "o_proj.weight"),
    "embedding": ("gemma", {"target_bytes": 50_000, "ratio": None, "preset": "fast"}, "embed_tokens.weight"),
    "norm": ("llama", {}, "1.input_layernorm.weight"),
}


def flip(file, part):
    """Change one byte of the first tensor whose name contains a text, and return its name."""
    raw = bytearray(file.read_bytes())
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    key = next(key for key in header if part in key)
    raw[8 + length + header[key]["data_offsets"][0] + 1] ^= 0x55
    file.write_bytes(raw)
    return key


@pytest.fixture
def stopped(tmp_path):
    """Return the export of a run that was stopped after it was written, and a function that resumes the run."""

    def run(model, config, kind):
        output = tmp_path / "out"
        mark = output / WORK_FOLDER_NAME / "exports" / f"{kind}.written"

        def resume():
            return compress(str(model), output, config, resume=True)

        with pytest.raises(CompressionCancelledError):
            compress(str(model), output, config, observer=Watch(should_cancel=mark.exists))
        return output / WORK_FOLDER_NAME / "exports" / kind, resume, output

    return run


@pytest.mark.parametrize("case", CASES)
def test_a_changed_byte_is_found_and_the_result_written_again(case, stopped, model_folder, settings, tmp_path):
    family, changes, part = CASES[case]
    config = settings(**(changes | {"export": ("rocket",)}))
    folder, resume, output = stopped(model_folder(family), config, "rocket")
    honest = (folder / "model.safetensors").read_bytes()
    key = flip(folder / "model.safetensors", part)
    with pytest.raises(FaultyResultError, match=rf"\(rocket\) is faulty.* at tensor '{key}'; neither the model"):
        resume()
    assert [path.name for path in output.iterdir()] == [WORK_FOLDER_NAME]
    resume()
    assert (output / "rocket" / "model.safetensors").read_bytes() == honest


@pytest.mark.parametrize("change", ["scale_exponent", "bits"])
def test_layers_that_compute_something_else_are_found(change, stopped, model_folder, settings):
    config = settings(method="rtn", ratio=None, export=("rocket",))
    folder, resume, output = stopped(model_folder("llama"), config, "rocket")
    described = json.loads((folder / "config.json").read_text())
    described["quantization_config"]["layers"]["model.layers.1.mlp.up_proj"][change] += 1
    (folder / "config.json").write_text(json.dumps(described))
    message = {
        "scale_exponent": r"80 of 80 outputs of 'model\.layers\.1\.mlp\.up_proj' differ .* by more than rounding",
        "bits": r"cannot be run: layer 'model\.layers\.1\.mlp\.up_proj': tensor",
    }[change]
    with pytest.raises(FaultyResultError, match=message):
        resume()
    assert not (output / "rocket").exists()


def test_an_expert_without_tokens_is_compared(stopped, settings, tmp_path):
    model = save_tiny_mixture("mixtral", tmp_path / "mixture")
    config = settings(method="rtn", ratio=None, export=("rocket",))
    folder, resume, _ = stopped(model, config, "rocket")
    described = json.loads((folder / "config.json").read_text())
    layers = described["quantization_config"]["layers"]
    experts = [name for name in layers if ".1.block_sparse_moe.experts." in name]
    for name in experts:
        layers[name]["scale_exponent"] += name.endswith("experts.3.w1")
    (folder / "config.json").write_text(json.dumps(described))
    with pytest.raises(FaultyResultError, match=r"layers\.1\..*experts\.3\.gate_proj' differ"):
        resume()


@pytest.mark.parametrize(("engine", "kind"), [("vllm", "compressed-tensors"), ("llama.cpp", "gguf")])
def test_files_of_other_engines_are_read_back(engine, kind, stopped, model_folder, settings):
    config = settings(engine=engine, bits=12.0, ratio=None, preset="fast", dtype="bfloat16")
    folder, resume, output = stopped(model_folder("llama"), config, kind)
    file = next(path for path in folder.iterdir() if path.suffix in (".gguf", ".safetensors"))
    raw = bytearray(file.read_bytes())
    raw[-40] ^= 1
    file.write_bytes(raw)
    with pytest.raises(FaultyResultError, match=rf"\({kind}\) is faulty: {file.name} differs after byte"):
        resume()
    resume()
    assert (output / kind / file.name).stat().st_size == len(raw)


def test_a_healed_artifact_is_read_back_and_run(finished, tmp_path):
    artifact = finished("llama")[0] / "rocket"
    window = torch.arange(3, 19)[None]
    copied = tmp_path / "copied"
    copied.mkdir()
    for file in artifact.iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    check_healed(artifact, {}, copied, window, torch.device("cpu"))
    flip(copied / "model.safetensors", "norm.weight")
    with pytest.raises(FaultyResultError, match="differs after byte"):
        check_healed(artifact, {}, copied, window, torch.device("cpu"))
