import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from rocket_core.errors import CheckpointFormatError, CorruptCheckpointError
from rocket_core.hf import RocketConfig
from rocket_core.modules import FORMAT_VERSION
from tests.reference.factored_models import load, logits
from tests.reference.tiny_models import FAMILIES, HIDDEN_SIZE

LAYER = "model.layers.1.mlp.up_proj"


@pytest.fixture
def llama_artifact(artifacts, tmp_path):
    """A copy of the Llama artifact, to damage."""
    for path in artifacts["llama"][1].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


class TestRefusals:
    def edit_config(self, folder, edit):
        config = json.loads((folder / "config.json").read_text())
        edit(config["quantization_config"])
        (folder / "config.json").write_text(json.dumps(config))

    def edit_tensors(self, folder, edit):
        path = folder / "model.safetensors"
        tensors = load_file(path)
        edit(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})

    @pytest.mark.parametrize(
        ("edit", "message"),
        [
            (lambda q: q.update(format_version=FORMAT_VERSION + 1), "upgrade"),
            (lambda q: q.update(format_version="1"), "format version"),
            (lambda q: q.update(blocksize=64), "blocksize"),
            (lambda q: q["layers"].update({"model.layers.7.mlp.up_proj": {"rank": 2, "nnz": 3}}), "no such linear"),
            (lambda q: q["layers"].update({"model.norm": {"rank": 2, "nnz": 3}}), "no such linear"),
            (lambda q: q["layers"][LAYER].update(rank="4"), "positive integers"),
            (lambda q: q["layers"][LAYER].update(nnz=True), "positive integers"),
            (lambda q: q["layers"][LAYER].pop("nnz"), "positive integers"),
            (lambda q: q["layers"].update({LAYER: 4}), "positive integers"),
            (lambda q: q["layers"][LAYER].update(nnz=10**6), "leave room for"),
        ],
    )
    def test_an_unreadable_format(self, llama_artifact, edit, message):
        self.edit_config(llama_artifact, edit)
        with pytest.raises(CheckpointFormatError, match=message):
            load(llama_artifact)

    @pytest.mark.parametrize(
        "edit",
        [
            lambda t: t.pop(f"{LAYER}.weight_u"),
            lambda t: t.pop(f"{LAYER}.weight_mask"),
            lambda t: t.pop(f"{LAYER}.weight"),
            lambda t: t.update({f"{LAYER}.weight": t[f"{LAYER}.weight"][:-1]}),
            lambda t: t.update({f"{LAYER}.weight_u": t[f"{LAYER}.weight_u"][:, 1:]}),
            lambda t: t[f"{LAYER}.weight_mask"][3].bitwise_xor_(1),
        ],
    )
    @pytest.mark.parametrize("options", [{}, {"ignore_mismatched_sizes": True}])
    def test_damaged_tensors_by_the_name_of_their_layer(self, llama_artifact, edit, options):
        self.edit_tensors(llama_artifact, edit)
        with pytest.raises(CorruptCheckpointError, match=LAYER):
            load(llama_artifact, **options)

    def test_a_mask_where_all_coefficients_are_stored(self, llama_artifact):
        dense = "model.layers.0.self_attn.v_proj"
        mask = torch.zeros(HIDDEN_SIZE // 2, 3, dtype=torch.uint8)
        self.edit_tensors(llama_artifact, lambda t: t.update({f"{dense}.weight_mask": mask}))
        with pytest.raises(CorruptCheckpointError, match=dense):
            load(llama_artifact)

    def test_a_damaged_mask_of_a_layer_kept_packed(self, llama_artifact):
        self.edit_tensors(llama_artifact, lambda t: t[f"{LAYER}.weight_mask"][3].bitwise_xor_(1))
        self.edit_config(llama_artifact, lambda q: q.update(keep_packed=True))
        with pytest.raises(CorruptCheckpointError, match=LAYER):
            logits(load(llama_artifact))

    def test_to_quantize_while_loading(self, tmp_path):
        FAMILIES["llama"]().save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="require the model to be pre-quantized"):
            load(tmp_path, quantization_config=RocketConfig())
