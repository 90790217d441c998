import re

import pytest
import torch
from safetensors import safe_open
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, Interleave, MergeModulelist, WeightConverter, WeightRenaming

from rocket_core.experts import (
    ExpertPart,
    FusedParameter,
    StoredMatrix,
    expert_projection,
    find_fused,
    is_expert_name,
    unfuse,
    unfused_conversions,
)
from rocket_core.experts.names import unknown_conversions
from tests.reference.tiny_mixtures import EXPERTS, MIXTURES

# The name of an expert's first matrix on disk; None if files hold the matrices of all experts together.
ON_DISK = {
    "mixtral": "model.layers.1.block_sparse_moe.experts.2.w1.weight",
    "qwen3_moe": "model.layers.1.mlp.experts.2.gate_proj.weight",
    "phimoe": "model.layers.1.block_sparse_moe.experts.2.w1.weight",
}


def renamed(conversions, key):
    for conversion in conversions:
        key, _ = conversion.rename_source_key(key)
    return key


@pytest.mark.parametrize("family", ON_DISK)
def test_names_on_disk_become_names_of_layers_and_back(family):
    model = MIXTURES[family]()
    conversions = unfused_conversions(get_model_conversion_mapping(model, add_legacy=False))
    name = renamed(conversions, ON_DISK[family])
    assert name == "model.layers.1.mlp.experts.2.gate_proj.weight"
    assert renamed([one.reverse_transform() for one in reversed(conversions)], name) == ON_DISK[family]
    # The tensors of a compressed layer are renamed like its weight.
    assert renamed(conversions, f"{ON_DISK[family]}_mask") == f"{name}_mask"


@pytest.mark.parametrize("family", MIXTURES)
def test_an_unfused_model_is_saved_with_one_matrix_each(family, tmp_path):
    model = MIXTURES[family]()
    unfuse(model)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as tensors:
        shapes = {key: tensors.get_slice(key).get_shape() for key in tensors.keys()}  # noqa: SIM118 (no mapping)
    assert not [key for key, shape in shapes.items() if len(shape) == 3]
    assert len([key for key in shapes if re.search(r"\.1\..*\.experts\..*weight$", key)]) == 3 * EXPERTS
    if family in ON_DISK:
        assert ON_DISK[family] in shapes


def test_conversions_of_other_parameters_are_unchanged():
    renaming = WeightRenaming(r"\.attn\.", ".self_attn.")
    joined = WeightConverter(["q", "k"], "qk", operations=[Concatenate(dim=0)])
    assert unfused_conversions([renaming, joined]) == [renaming, joined]
    assert not unknown_conversions([renaming, joined])


@pytest.mark.parametrize(
    "conversion",
    [
        WeightConverter("mlp.experts.w13", "mlp.experts.gate_up_proj", operations=[Interleave(dim=1)]),
        WeightConverter("mlp.experts.*.w13", "mlp.experts.gate_up_proj", operations=[MergeModulelist(dim=0)]),
    ],
)
def test_experts_that_files_store_otherwise_stay_fused(conversion, monkeypatch):
    assert unknown_conversions([conversion]) == ["mlp.experts.gate_up_proj"]
    model = MIXTURES["mixtral"]()
    monkeypatch.setattr("rocket_core.experts.unfusing._conversions", lambda _model: [conversion])
    assert not find_fused(model)
    unfuse(model)
    assert "model.layers.0.mlp.experts.gate_up_proj" in model.state_dict()


def test_names_of_experts_are_told_from_others():
    modules = ["model.layers.1.mlp.experts"]
    assert is_expert_name("model.layers.1.mlp.experts.12.up_proj", modules)
    assert not is_expert_name("model.layers.1.mlp.experts.gate_up_proj", modules)
    assert not is_expert_name("model.layers.11.mlp.experts.12.up_proj", modules)
    assert not is_expert_name("model.layers.1.mlp.shared_experts.up_proj", modules)


def test_a_projection_is_named_without_the_expert():
    modules = ["model.layers.1.mlp.experts"]
    assert expert_projection("model.layers.1.mlp.experts.12.up_proj", modules) == "model.layers.1.mlp.experts.up_proj"
    for other in ("model.layers.11.mlp.experts.12.up_proj", "model.layers.1.mlp.shared_expert.up_proj", "lm_head"):
        assert expert_projection(other, modules) is None


def test_a_parameter_that_a_file_has_transposed_is_read_so():
    parts = {"0.up_proj.weight": ExpertPart(stored=StoredMatrix(parameter="up_proj"), expert=0)}
    fused = FusedParameter(shape=(2, 6, 4), by_expert=(2, 6, 4), parts=parts)
    stored = torch.arange(48.0).reshape(2, 4, 6)
    turned = fused.as_stored((2, 4, 6))
    assert turned.shape == (2, 4, 6)
    assert torch.equal(turned.parts["0.up_proj.weight"].of(stored), stored[0].T)
    for shape in ((2, 6, 4), (2, 5, 4)):
        assert fused.as_stored(shape) is fused
