"""Every tensor of the original is accounted for, and sums agree with what is in the files."""

import re
from collections import Counter

import gguf
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from rocket_core.config import compression_config
from rocket_core.pipeline import compress
from rocket_core.report.schema import CompressionReport
from rocket_core.report.tensor_groups import TensorAccount, grouped
from tests.reference.few_bit_models import save_few_bits
from tests.reference.tiny_mixtures import MIXTURES, save_tiny_mixture
from tests.reference.tiny_models import byte_tokenizer
from tests.sampling import sweep


def tensors_of(folder):
    """Return the bytes of each tensor in the safetensors of a folder, by the package safetensors."""
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name).nbytes for name in opened.keys()}  # noqa: SIM118
    return found


@pytest.fixture
def source(model_folder, tmp_path):
    """Return a function that returns the folder of a model of a family."""

    def find(family):
        return save_tiny_mixture(family, tmp_path / family) if family in MIXTURES else model_folder(family)

    return find


def general(name):
    return re.sub(r"\.\d+(?=\.)", ".*", name)


@pytest.mark.parametrize(
    ("family", "changes"),
    sweep(
        [("llama", {}), ("granitemoe", {}), ("llama", {"engine": "vllm", "dtype": "bfloat16"})],
        soak=[
            ("gpt2", {}),
            ("bert", {}),
            ("llama", {"export": ("dense",)}),
            ("llama", {"engine": "mlx", "dtype": "bfloat16"}),
        ],
    ),
)
def test_tensors_and_bytes_are_those_of_both_files(source, settings, tmp_path, family, changes):
    model = source(family)
    config = settings(preset="fast", ratio=None, bits=12, sensitivity_samples=4, **changes)
    report = compress(str(model), tmp_path / "out", config)
    original, written = tensors_of(model), tensors_of(tmp_path / "out" / report.exports[0].folder)
    assert sum(group.original_bytes for group in report.tensors) == sum(original.values())
    assert sum(group.stored_bytes for group in report.tensors) == sum(written.values())
    if family not in MIXTURES:
        assert sum(group.tensors for group in report.tensors) == len(original)
        assert {group.name for group in report.tensors} == {general(name) for name in original}
    compressed = sum(group.tensors for group in report.tensors if group.fate == "compressed")
    assert compressed == sum(layer.kind != "dense" for layer in report.layers) > 0
    assert not [group for group in report.tensors if group.fate in {"left out", "added"}]
    assert CompressionReport.model_validate_json((tmp_path / "out" / "report.json").read_bytes()) == report
    assert "What became of each tensor" in (tmp_path / "out" / "report.html").read_text()


def test_blocks_that_predict_further_tokens_are_left_out(tmp_path):
    model = save_few_bits("deepseek_v3", tmp_path / "model")
    report = compress(str(model), tmp_path / "out", compression_config(preset="instant", bits=8))
    original, written = tensors_of(model), tensors_of(tmp_path / "out" / "rocket")
    assert sum(group.original_bytes for group in report.tensors) == sum(original.values())
    assert sum(group.stored_bytes for group in report.tensors) == sum(written.values())
    left_out = {group.name: group.original_bytes for group in report.tensors if group.fate == "left out"}
    following = {name: size for name, size in original.items() if name.startswith("model.layers.2.")}
    assert {general(name) for name in following} <= set(left_out)
    assert sum(left_out.values()) == sum(following.values())


@pytest.mark.parametrize("engine", ["rocket", "vllm"])
def test_layers_for_further_tokens_are_kept(tmp_path, engine):
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "linear_num_value_heads": 2}
    linear = {"linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 320}
    config = Qwen3_5TextConfig(**sizes, **heads, **linear)
    Qwen3_5ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    further = {"mtp.fc.weight": torch.ones(64, 128), "mtp.layers.0.mlp.up_proj.weight": torch.ones(96, 64)}
    save_file(load_file(file) | further, file, metadata={"format": "pt"})
    chosen = compression_config(preset="instant", bits=9, engine=engine)
    report = compress(str(tmp_path / "model"), tmp_path / "out", chosen)
    groups = {group.name: group for group in report.tensors if group.name.startswith("mtp")}
    assert {name: group.fate for name, group in groups.items()} == {general(name): "kept" for name in further}
    written = tensors_of(tmp_path / "out" / report.exports[0].folder)
    assert {name: written[name] for name in further} == {name: tensor.nbytes for name, tensor in further.items()}


def test_a_gguf_file_leaves_out_what_llama_cpp_shares(model_folder, settings, tmp_path):
    config = settings(preset="fast", ratio=None, bits=12, sensitivity_samples=4, engine="llama.cpp")
    report = compress(str(model_folder("llama")), tmp_path / "out", config)
    read = gguf.GGUFReader(tmp_path / "out" / "gguf" / "model.gguf").tensors
    assert sum(group.stored_bytes for group in report.tensors) == sum(int(tensor.n_bytes) for tensor in read)
    assert sum(group.original_bytes for group in report.tensors) == sum(tensors_of(model_folder("llama")).values())
    fates = Counter(group.fate for group in report.tensors for _ in range(group.tensors))
    assert fates["compressed"] == sum(layer.kind != "dense" for layer in report.layers) > 0
    assert fates["compressed"] + fates["kept"] + fates["converted"] == len(read)


def test_another_dtype_is_told(model_folder, settings, tmp_path):
    report = compress(str(model_folder("llama")), tmp_path / "out", settings(dtype="bfloat16"))
    assert {group.fate for group in report.tensors} == {"compressed", "converted"}
    assert torch.bfloat16.itemsize * 2 * sum(
        group.stored_bytes for group in report.tensors if group.fate == "converted"
    ) == 2 * sum(group.original_bytes for group in report.tensors if group.fate == "converted")


def test_names_are_grouped_by_fate():
    def account(name, fate):
        return TensorAccount(name=name, fate=fate, original_bytes=3, stored_bytes=2)

    names = ("layers.0.a.weight", "layers.1.a.weight", "layers.10.experts.3.a.weight", "b2.weight")
    found = grouped([*(account(name, "kept") for name in names), account(names[0], "compressed")])
    assert [(group.name, group.fate, group.tensors, group.original_bytes) for group in found] == [
        ("layers.*.a.weight", "kept", 2, 6),
        ("layers.*.experts.*.a.weight", "kept", 1, 3),
        ("b2.weight", "kept", 1, 3),
        ("layers.*.a.weight", "compressed", 1, 3),
    ]
