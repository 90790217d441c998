import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from rocket_core.config import CompressionConfig
from rocket_core.errors import AlreadyQuantizedError
from rocket_core.hub.requests import check_request, read_weights
from rocket_core.inspection.checks.coded_weights import Scheme, find_coded
from rocket_core.inspection.files.safetensors_headers import FLOAT_DTYPES, TensorHeader
from rocket_core.inspection.headers.weight_summary import summarize, summarize_files
from rocket_core.pipeline import compress
from tests.reference.coded_models import SCHEMES, save_coded
from tests.reference.few_bit_models import describe
from tests.reference.tiny_mixtures import MIXTURES, save_tiny_mixture
from tests.reference.tiny_models import ALL_FAMILIES, save_tiny_model


def header(key, dtype="F32", shape=(8, 8)):
    size = {"F32": 4, "I32": 4}.get(dtype, 1) * torch.Size(shape).numel()
    return TensorHeader(key=key, dtype=dtype, shape=shape, start=0, stop=size)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_coded_weights_are_refused_by_their_headers(scheme, tmp_path):
    folder = save_coded(scheme, tmp_path / "model")
    with pytest.raises(AlreadyQuantizedError, match=rf"{scheme}.* \(tensor 'model\.layers\.0\..*original") as refusal:
        check_request(str(folder), CompressionConfig(ratio=0.3))
    with pytest.raises(AlreadyQuantizedError) as other:
        compress(str(folder), tmp_path / "out", CompressionConfig(ratio=0.3))
    assert str(refusal.value) == str(other.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("scheme", "algorithm"), [("FP8 with scales", "FP8"), ("NVFP4", "NVFP4")])
def test_the_description_to_add_for_modelopt_is_named(scheme, algorithm, tmp_path):
    folder = save_coded(scheme, tmp_path / "model")
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": algorithm}}))
    with pytest.raises(AlreadyQuantizedError) as refusal:
        check_request(str(folder), CompressionConfig(ratio=0.3))
    added = re.search(r"add (\"quantization_config\": \{.*\}) to config\.json", str(refusal.value))
    describe(folder, **json.loads(f"{{{added[1]}}}"))
    check_request(str(folder), CompressionConfig(ratio=0.3))


def test_a_stripped_artifact_of_rocket_is_recognised(tmp_path):
    tensors = {"model.layers.0.up.weight": torch.ones(9), "model.layers.0.up.weight_u": torch.ones(2, 8)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert find_coded(read_weights(tmp_path, "m")).scheme is Scheme.ROCKET


@pytest.mark.parametrize("part", ["_scale", "_scale_inv", "_scales"])
def test_scales_in_another_file_are_found(part):
    files = [[header("model.layers.0.experts.down_proj", shape=(4, 8, 8))]]
    files.append([header(f"model.layers.0.experts.down_proj{part}", shape=(4, 1, 1))])
    found = find_coded(summarize_files(files))
    assert found is not None
    assert found.key.endswith(part)


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_plain_dtypes_are_not_coded(dtype):
    key = "model.layers.0.mlp.experts.gate_up_proj"
    header = TensorHeader(key=key, dtype=dtype, shape=(4, 8, 8), start=0, stop=2048)
    assert find_coded(summarize([header])) is None


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F4", "I8", "U8", "I32"])
def test_experts_of_codes_are_found(dtype):
    found = find_coded(summarize([header("model.layers.0.mlp.experts.gate_up_proj", dtype, (4, 8, 8))]))
    assert found is not None
    assert found.dtype == dtype


@pytest.mark.parametrize(
    ("key", "dtype", "shape"),
    [
        ("h.0.attn.bias", "U8", (1, 1, 64, 64)),
        ("h.0.attn.causal_mask", "BOOL", (1, 1, 64, 64)),
        ("embeddings.position_ids", "I64", (1, 512)),
        ("layers.0.attention.relative_position_index", "I64", (49, 49)),
        ("layers.0.norm.num_batches_tracked", "I64", ()),
        ("logit_scale", "F32", ()),
        ("layers.0.router.per_expert_scale", "F32", (8,)),
        ("layers.0.layer_scale", "F32", (8,)),
    ],
)
def test_numbers_that_are_no_weights_are_not_coded(key, dtype, shape):
    assert find_coded(summarize([header(key, dtype, shape), header("layers.0.router.weight")])) is None


@pytest.mark.parametrize("family", [*ALL_FAMILIES, *MIXTURES])
def test_plain_models_of_all_families_are_not_coded(family, tmp_path):
    save = save_tiny_model if family in ALL_FAMILIES else save_tiny_mixture
    assert find_coded(read_weights(save(family, tmp_path), "m")) is None


def test_one_coded_layer_is_enough(tmp_path):
    folder = save_tiny_model("llama", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    key = "model.layers.1.mlp.up_proj.weight"
    save_file(tensors | {key: tensors[key].to(torch.float8_e4m3fn)}, folder / "model.safetensors")
    with pytest.raises(AlreadyQuantizedError, match=r"layers\.1\.mlp\.up_proj\.weight', F8_E4M3"):
        check_request(str(folder), CompressionConfig(ratio=0.3))
