import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from rocket_core.errors import CheckpointFormatError, CorruptCheckpointError
from rocket_core.hf import RocketConfig
from rocket_core.layers import FORMAT_VERSION
from tests.reference.factored_models import load, logits
from tests.reference.tiny_models import FAMILIES, HIDDEN_SIZE

LAYER = "model.layers.1.mlp.up_proj"
OWNER = "model.layers.0.self_attn.q_proj"
FIRST_FOLLOWER = "model.layers.0.self_attn.k_proj"
FOLLOWER = "model.layers.0.self_attn.v_proj"
SPARSE = "model.layers.0.self_attn.o_proj"
FULL = "model.layers.0.mlp.down_proj"
FACTORED = "model.layers.1.self_attn.o_proj"


def copy_of(folder, target):
    """Return a copy of an artifact, to damage."""
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


@pytest.fixture
def llama_artifact(artifacts, tmp_path):
    return copy_of(artifacts["llama"][1], tmp_path)


@pytest.fixture
def mixed_artifact(artifacts, tmp_path):
    return copy_of(artifacts["llama, all kinds"][1], tmp_path)


@pytest.fixture
def quantized_artifact(artifacts, tmp_path):
    return copy_of(artifacts["llama, quantized"][1], tmp_path)


def edit_config(folder, edit):
    config = json.loads((folder / "config.json").read_text())
    edit(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder, edit):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


class TestRefusals:
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
    def test_an_unreadable_format_is_refused(self, llama_artifact, edit, message):
        edit_config(llama_artifact, edit)
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
    def test_damaged_tensors_are_refused_by_layer_name(self, llama_artifact, edit, options):
        edit_tensors(llama_artifact, edit)
        with pytest.raises(CorruptCheckpointError, match=LAYER):
            load(llama_artifact, **options)

    def test_a_mask_for_fully_stored_coefficients_is_refused(self, llama_artifact):
        dense = "model.layers.0.self_attn.v_proj"
        mask = torch.zeros(HIDDEN_SIZE // 2, 3, dtype=torch.uint8)
        edit_tensors(llama_artifact, lambda t: t.update({f"{dense}.weight_mask": mask}))
        with pytest.raises(CorruptCheckpointError, match=dense):
            load(llama_artifact)

    def test_a_damaged_mask_of_a_packed_layer_is_refused(self, llama_artifact):
        edit_tensors(llama_artifact, lambda t: t[f"{LAYER}.weight_mask"][3].bitwise_xor_(1))
        edit_config(llama_artifact, lambda q: q.update(keep_packed=True))
        with pytest.raises(CorruptCheckpointError, match=LAYER):
            logits(load(llama_artifact))

    def test_quantizing_while_loading_is_refused(self, tmp_path):
        FAMILIES["llama"]().save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="require the model to be pre-quantized"):
            load(tmp_path, quantization_config=RocketConfig())


def set_entry(layer, **changes):
    return lambda q: q["layers"][layer].update(changes)


def drop(layer, key):
    return lambda q: q["layers"][layer].pop(key)


class TestRefusalsOfFormat2:
    @pytest.mark.parametrize(
        ("edit", "layer", "message"),
        [
            (lambda q: q.update(format_version=1), FULL, "format 1"),
            (set_entry(FOLLOWER, dictionary="model.layers.7.self_attn.q_proj"), FOLLOWER, "not in the table"),
            (set_entry(FOLLOWER, dictionary=FOLLOWER), FOLLOWER, "which has none"),
            (set_entry(FOLLOWER, dictionary=SPARSE), FOLLOWER, "which has none"),
            (set_entry(FOLLOWER, rank=50), FOLLOWER, "rank 50"),
            (set_entry(FOLLOWER, nnz=10**6), FOLLOWER, "leave room for"),
            (set_entry(FOLLOWER, dictionary=1), FOLLOWER, "'dictionary'"),
            (lambda q: q["layers"].pop(OWNER), FIRST_FOLLOWER, "not in the table"),
            (set_entry(OWNER, dictionary=LAYER), OWNER, "which has none|has rank"),
            (set_entry(SPARSE, dictionary=OWNER), SPARSE, "no rank"),
            (set_entry(SPARSE, nnz=HIDDEN_SIZE**2 + 1), SPARSE, "leave room for 1024"),
            (lambda q: q["layers"][FULL].update(q["layers"][OWNER] | {"dictionary": OWNER}), FULL, "80 inputs"),
        ],
    )
    def test_an_invalid_table_is_refused(self, mixed_artifact, edit, layer, message):
        edit_config(mixed_artifact, edit)
        with pytest.raises(CheckpointFormatError, match=f"'{layer}'.*({message})") as refusal:
            load(mixed_artifact)
        assert any(remedy in str(refusal.value) for remedy in ("fetch it again", "check that config.json"))

    @pytest.mark.parametrize(
        ("edit", "layer"),
        [
            (lambda t: t.pop(f"{OWNER}.weight_u"), OWNER),
            (lambda t: t.update({f"{FOLLOWER}.weight_u": t[f"{OWNER}.weight_u"].clone()}), FOLLOWER),
            (lambda t: t.pop(f"{FOLLOWER}.weight_mask"), FOLLOWER),
            (lambda t: t.pop(f"{FOLLOWER}.weight"), FOLLOWER),
            (lambda t: t.pop(f"{SPARSE}.weight_mask"), SPARSE),
            (lambda t: t.update({f"{SPARSE}.weight": t[f"{SPARSE}.weight"][:-1]}), SPARSE),
            (lambda t: t.update({f"{SPARSE}.weight": torch.ones(32, 32)}), SPARSE),
            (lambda t: t.update({f"{SPARSE}.weight_u": torch.ones(4, 32)}), SPARSE),
            (lambda t: t[f"{SPARSE}.weight_mask"][3, 0].bitwise_xor_(1), SPARSE),
            (lambda t: t.pop(f"{FULL}.weight_mask"), FULL),
        ],
    )
    @pytest.mark.parametrize("options", [{}, {"ignore_mismatched_sizes": True}])
    def test_damaged_tensors_are_refused_by_layer_name(self, mixed_artifact, edit, layer, options):
        edit_tensors(mixed_artifact, edit)
        with pytest.raises(CorruptCheckpointError, match=layer):
            load(mixed_artifact, **options)

    @pytest.mark.parametrize(
        ("edit", "layer"),
        [
            (drop(FACTORED, "rank"), FACTORED),  # now sparse
            (drop(FOLLOWER, "dictionary"), FOLLOWER),  # now with its own dictionary
            (set_entry(SPARSE, rank=40), SPARSE),  # now factored
            (lambda q: q["layers"].pop(SPARSE), SPARSE),
        ],
    )
    @pytest.mark.parametrize("options", [{}, {"ignore_mismatched_sizes": True}])
    def test_tensors_of_another_kind_than_in_the_table_are_refused(self, mixed_artifact, edit, layer, options):
        edit_config(mixed_artifact, edit)
        with pytest.raises((CorruptCheckpointError, CheckpointFormatError), match=layer):
            load(mixed_artifact, **options)


# Layers of the quantized artifact; the scales of `HALVES` are float16.
CODES = "model.layers.0.self_attn.q_proj"
PRUNED = "model.layers.0.self_attn.k_proj"
DENSE = "model.layers.0.self_attn.o_proj"
HALVES = "model.layers.1.self_attn.q_proj"


def set_first_scale(value):
    return lambda t: t[f"{HALVES}.weight_scale"][:2].copy_(torch.tensor([value]).half().view(torch.uint8))


class TestRefusalsOfFormat3:
    @pytest.mark.parametrize(
        ("edit", "layer", "message"),
        [
            (lambda q: q.update(format_version=2), FULL, "format 2"),
            (set_entry(CODES, bits=9), CODES, "'bits'"),
            (set_entry(CODES, scale_exponent=10**6), CODES, "not within 600"),
            (set_entry(CODES, nnz=4, rank=2), CODES, "a dictionary_exponent is for"),
            (drop(CODES, "scale_bits"), CODES, "neither coefficients nor codes"),
        ],
    )
    def test_an_invalid_table_is_refused(self, quantized_artifact, edit, layer, message):
        edit_config(quantized_artifact, edit)
        with pytest.raises(CheckpointFormatError, match=f"'{layer}'.*({message}).*fetch it again"):
            load(quantized_artifact)

    @pytest.mark.parametrize(
        ("edit", "layer"),
        [
            (set_entry(CODES, bits=3), CODES),
            (set_entry(CODES, group_size=8), CODES),
            (set_entry(CODES, scale_bits=16), CODES),
            (lambda q: q["layers"].pop(CODES), CODES),
            (lambda q: q["layers"].update({DENSE: q["layers"][CODES]}), DENSE),
        ],
    )
    @pytest.mark.parametrize("options", [{}, {"ignore_mismatched_sizes": True}])
    def test_tensors_of_another_format_are_refused(self, quantized_artifact, edit, layer, options):
        edit_config(quantized_artifact, edit)
        with pytest.raises(CorruptCheckpointError, match=layer):
            load(quantized_artifact, **options)

    @pytest.mark.parametrize(
        ("edit", "layer"),
        [
            (lambda t: t.pop(f"{CODES}.weight"), CODES),
            (lambda t: t.pop(f"{CODES}.weight_scale"), CODES),
            (lambda t: t.update({f"{CODES}.weight": t[f"{CODES}.weight"][:-1]}), CODES),
            (lambda t: t.update({f"{CODES}.weight_scale": t[f"{CODES}.weight_scale"][:-1]}), CODES),
            (lambda t: t.update({f"{CODES}.weight": t[f"{CODES}.weight"].float()}), CODES),
            (lambda t: t.update({f"{HALVES}.weight_scale": t[f"{HALVES}.weight_scale"].view(torch.float16)}), HALVES),
            (lambda t: t.update({f"{CODES}.weight_mask": t[f"{CODES}.weight_scale"].clone()}), CODES),
            (lambda t: t.update({f"{PRUNED}.weight_scale": t[f"{CODES}.weight"].clone()}), PRUNED),
            (set_first_scale(0.0), HALVES),
            (set_first_scale(float("nan")), HALVES),
            (set_first_scale(float("-inf")), HALVES),
        ],
    )
    @pytest.mark.parametrize("options", [{}, {"ignore_mismatched_sizes": True}])
    def test_damaged_tensors_are_refused_by_layer_name(self, quantized_artifact, edit, layer, options):
        edit_tensors(quantized_artifact, edit)
        with pytest.raises(CorruptCheckpointError, match=layer):
            load(quantized_artifact, **options)

    def test_a_damaged_scale_of_a_packed_layer_is_refused(self, quantized_artifact):
        edit_tensors(quantized_artifact, set_first_scale(float("inf")))
        edit_config(quantized_artifact, lambda q: q.update(keep_packed=True))
        with pytest.raises(CorruptCheckpointError, match=HALVES):
            logits(load(quantized_artifact))
