"""float16 checkpoints on a CPU: computed in float32, stored in float16."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.llama.modeling_llama import LlamaMLP

from rocket_core.evaluation import evaluate_text
from rocket_core.pipeline import compress


@pytest.fixture(scope="module")
def half(tmp_path_factory, model_folder):
    """Return a float16 checkpoint, and a float32 one of the same numbers."""
    folders = []
    for dtype in (torch.float16, torch.float32):
        folder = tmp_path_factory.mktemp("half") / str(dtype)
        folder.mkdir()
        for file in model_folder("llama").iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        weights = {name: tensor.half().to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"dtype": str(dtype).removeprefix("torch.")}))
        folders.append(folder)
    return folders


@pytest.fixture
def dtypes(monkeypatch):
    """Return the dtypes of the hidden states that reach a block's MLP."""
    seen = set()
    forward = LlamaMLP.forward

    def recorded(self, x):
        seen.add(x.dtype)
        return forward(self, x)

    monkeypatch.setattr(LlamaMLP, "forward", recorded)
    return seen


@pytest.mark.parametrize("changes", [{}, {"sequential": True}, {"objective": "fisher"}], ids=str)
def test_float16_models_run_in_float32_on_a_cpu(half, settings, tmp_path, dtypes, changes):
    compress(str(half[0]), tmp_path / "out", settings(device="cpu", **changes))
    assert dtypes == {torch.float32}
    for export in ("factored", "dense"):
        stored = load_file(tmp_path / "out" / export / "model.safetensors")
        assert {tensor.dtype for tensor in stored.values()} <= {torch.float16, torch.uint8}


def test_results_equal_those_of_the_same_numbers_in_float32(half, settings, tmp_path):
    for folder, name in zip(half, ("half", "single"), strict=True):
        compress(str(folder), tmp_path / name, settings(device="cpu", dtype="float16"))
    one, other = (load_file(tmp_path / name / "factored" / "model.safetensors") for name in ("half", "single"))
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_float16_models_are_evaluated_in_float32(half, dtypes, text):
    result = evaluate_text(half[0], text, sequence_length=16, limit=4, device="cpu")
    assert dtypes == {torch.float32}
    assert result.dtype == "float32"
