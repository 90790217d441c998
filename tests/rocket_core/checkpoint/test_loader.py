import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rocket_core.checkpoint import PartEntry, WeightLoader, open_checkpoint
from rocket_core.errors import CorruptCheckpointError
from rocket_core.models.architecture import build_architecture, read_config
from tests.reference.tiny_mixtures import EXPERT_SIZE, EXPERTS, MIXTURES, inputs, save_tiny_mixture

# Families whose files hold the matrices of all experts of a block in one tensor.
TOGETHER = {
    "gpt_oss": "model.layers.1.mlp.experts.",
    "granitemoe": "model.layers.1.block_sparse_moe.",
    "llama4": "model.layers.1.feed_forward.experts.",
}


def opened(folder):
    checkpoint = open_checkpoint(folder)
    model = build_architecture(read_config(folder), torch.float32).model
    return model, WeightLoader(model, checkpoint, torch.device("cpu")), checkpoint


@pytest.mark.parametrize("family", MIXTURES)
def test_a_loaded_mixture_equals_the_saved_one(family, tmp_path):
    model, loader, _ = opened(save_tiny_mixture(family, tmp_path))
    loader.load(name for name, _ in model.named_children())
    with torch.no_grad():
        expected = MIXTURES[family]()(inputs()).logits
        torch.testing.assert_close(model(inputs()).logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system takes no advice on files")
@pytest.mark.parametrize("family", MIXTURES)
def test_the_system_reads_a_block_ahead(family, tmp_path, monkeypatch):
    _, loader, checkpoint = opened(save_tiny_mixture(family, tmp_path))
    told = []

    def advised(descriptor, start, length, advice):
        assert advice == os.POSIX_FADV_WILLNEED
        told.append((Path(f"/proc/self/fd/{descriptor}").resolve(), start, length))

    monkeypatch.setattr(os, "posix_fadvise", advised)
    loader.will_load("model.layers.1")
    block = [entry for key, entry in checkpoint.entries.items() if "layers.1." in key]
    assert sorted(told) == sorted((entry.file.resolve(), entry.start, entry.nbytes) for entry in block)


@pytest.mark.parametrize("family", TOGETHER)
def test_a_single_expert_is_read_from_a_tensor_of_all(family, tmp_path):
    model, loader, checkpoint = opened(save_tiny_mixture(family, tmp_path))
    name = next(name for name, _ in model.named_modules() if name.endswith("experts.3.up_proj") and ".1." in name)
    entry = loader.entry(f"{name}.weight")
    assert isinstance(entry, PartEntry)
    assert entry.key == f"{name}.weight"
    assert entry.nbytes == sum(map(len, entry.chunks())) == 4 * EXPERT_SIZE * 32
    loader.load([name])
    loaded = model.get_submodule(name)
    assert torch.equal(loaded.weight, entry.read())
    assert loaded.weight.untyped_storage().nbytes() == entry.nbytes, "gate is in memory as well"
    stored = load_file(checkpoint.files[0])
    fused = stored[TOGETHER[family] + {"granitemoe": "input_linear.weight"}.get(family, "gate_up_proj")]
    expected = {
        "gpt_oss": lambda: fused[3, :, 1::2].T,
        "granitemoe": lambda: fused[3, EXPERT_SIZE:],
        "llama4": lambda: fused[3, :, EXPERT_SIZE:].T,
    }[family]()
    assert torch.equal(loaded.weight, expected)
    if family == "gpt_oss":
        assert torch.equal(loaded.bias, stored[f"{TOGETHER[family]}gate_up_proj_bias"][3, 1::2])
    assert not [key for key, value in model.named_parameters() if not value.is_meta and not key.startswith(name)]
    loader.unload(loaded)
    assert loaded.weight.is_meta


@pytest.mark.parametrize("family", TOGETHER)
def test_a_tensor_of_all_experts_is_split_without_remainder(family, tmp_path):
    model, loader, checkpoint = opened(save_tiny_mixture(family, tmp_path))
    split = {key: loader.parts(key) for key in checkpoint.entries if loader.parts(key)}
    assert len(split) == (8 if family == "gpt_oss" else 4)
    for key, parts in split.items():
        assert sum(part.nbytes for part in parts.values()) == checkpoint.entries[key].nbytes
    names = {name for parts in split.values() for name in parts}
    assert names == {name for name, _ in model.named_parameters() if ".experts." in name}
    assert not loader.parts("model.embed_tokens.weight")


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])
def test_another_number_of_experts_is_reported(family, tmp_path):
    folder = save_tiny_mixture(family, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_local_experts": EXPERTS + 1}))
    with pytest.raises(CorruptCheckpointError, match=r"config\.json"):
        opened(folder)


def test_a_missing_expert_is_reported(tmp_path):
    folder = save_tiny_mixture("mixtral", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.block_sparse_moe.experts.2.w3.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _, loader, _ = opened(folder)
    assert loader.entry("model.layers.0.mlp.experts.2.up_proj.weight") is None
    with pytest.raises(CorruptCheckpointError, match=r"experts\.2\.up_proj"):
        loader.load(["model.layers.0"])
