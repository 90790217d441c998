"""Exports made from a stored artifact, compared with those that the compression writes."""

import functools
import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import rocket_core.hf  # noqa: F401 (registers the format)
from rocket_core.config import compression_config
from rocket_core.errors import CorruptCheckpointError, InvalidConfigError, ModelNotFoundError, UnsupportedExportError
from rocket_core.exports.artifact_folder import read_report
from rocket_core.exports.conversion import export_artifact
from rocket_core.pipeline import compress
from tests.reference.tiny_mixtures import MIXTURES, inputs, save_tiny_mixture
from tests.reference.tiny_models import save_tiny_model
from tests.sampling import sweep

pytestmark = pytest.mark.slow

BYTES = {"ratio": None, "preset": "fast"}
CASES = {
    "factors and sparse weights": ("llama", {}),
    "transposed weights": ("gpt2", {"ratio": 0.5}),
    "codes": ("bert", {**BYTES, "bits": 5.0}),
    "codes and entropy codes, with embeddings": ("llama", {**BYTES, "target_bytes": 110_000}),
    "values of 4 bits": ("llama", {"value_bits": 4}),
    "two lists of blocks": ("t5", {}),
    "experts stored alone": ("mixtral", {}),
    "experts stored together": ("gpt_oss", {}),
    "experts one after the other": ("dbrx", {}),
}
FEW = ["transposed weights", "codes and entropy codes, with embeddings", "values of 4 bits", "experts stored together"]


@pytest.fixture(scope="module")
def compressed(tmp_path_factory):
    """Return the output folder of a compression of a tiny family, made once."""
    text = tmp_path_factory.mktemp("text") / "calibration.jsonl"
    words = ["rocket", "atom", "layer", "sparse", "rank", "budget", "gram", "the", "a", "of"]
    lines = [
        {"text": " ".join(words[(7 * line + 3 * word * word) % len(words)] for word in range(60))} for line in range(40)
    ]
    text.write_text("".join(json.dumps(line) + "\n" for line in lines))

    @functools.cache
    def make(family, settings):
        folder = tmp_path_factory.mktemp("models") / family
        if family == "wide llama":
            save_tiny_model("llama", folder)
            config = json.loads((folder / "config.json").read_text())
            torch.manual_seed(0)
            sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
            LlamaForCausalLM(LlamaConfig(**{**config, **sizes})).to(torch.float16).save_pretrained(folder)
        else:
            save_tiny_mixture(family, folder) if family in MIXTURES else save_tiny_model(family, folder)
        chosen = {
            "ratio": 0.3,
            "calibration": {"dataset": str(text), "samples": 8, "sequence_length": 32},
            "sensitivity_samples": 4,
            "export": ("rocket", "dense"),
        }
        output = tmp_path_factory.mktemp("compressed") / "out"
        compress(str(folder), output, compression_config(**chosen | json.loads(settings)))
        return output

    return lambda family, **settings: make(family, json.dumps(settings))


def weights(folder):
    return {file.name: file.read_bytes() for file in (*folder.glob("*.safetensors"), folder / "config.json")}


@pytest.mark.parametrize("case", sweep(FEW, soak=[case for case in CASES if case not in FEW]))
def test_a_dense_export_is_that_of_the_compression(case, compressed, tmp_path):
    family, settings = CASES[case]
    output = compressed(family, **settings)
    made = export_artifact(output / "rocket", tmp_path / "later", "dense")
    assert weights(tmp_path / "later") == weights(output / "dense")
    report = read_report(tmp_path / "later")
    assert report.exports[-1] == made
    assert made.stored_bytes == next(one.stored_bytes for one in report.exports if one.kind == "dense")
    others = {file.name for file in (output / "dense").iterdir()}
    assert {file.name for file in (tmp_path / "later").iterdir()} == others


@torch.no_grad()
def test_stock_transformers_loads_a_later_dense_mixture(compressed, tmp_path):
    output = compressed("gpt_oss")
    export_artifact(output / "rocket", tmp_path / "later", "dense")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "later")
    factored = AutoModelForCausalLM.from_pretrained(output / "rocket")
    assert torch.allclose(model(inputs()).logits, factored(inputs()).logits, atol=1e-5)


def test_formats_of_vllm_are_exported_unchanged(compressed, tmp_path):
    output = compressed("wide llama", ratio=None, bits=6.5, engine="vllm", export=("compressed-tensors", "rocket"))
    export_artifact(output / "rocket", tmp_path / "later", "compressed-tensors")
    assert weights(tmp_path / "later") == weights(output / "compressed-tensors")


@pytest.mark.parametrize(("bits", "kind"), [(4, "Q4_0"), (5, "Q5_0")])
def test_codes_become_the_same_weights_in_gguf(bits, kind, compressed, tmp_path):
    gguf = pytest.importorskip("gguf")
    output = compressed("wide llama", ratio=None, method="rtn", code_bits=bits)
    made = export_artifact(output / "rocket", tmp_path / "later", "gguf")
    assert made.stored_bytes == (tmp_path / "later" / "model.gguf").stat().st_size
    dense = load_file(output / "dense" / "model.safetensors")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "later" / "model.gguf").tensors}
    for name, stock in (("ffn_down", "mlp.down_proj"), ("ffn_up", "mlp.up_proj"), ("attn_output", "self_attn.o_proj")):
        tensor = tensors[f"blk.0.{name}.weight"]
        assert tensor.tensor_type.name == kind
        found = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        assert torch.equal(found.half(), dense[f"model.layers.0.{stock}.weight"])


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("gguf", {}, "product of two factors|made of coefficients"),
        ("gguf", {"ratio": None, "bits": 5.0}, "groups of|does not represent|codes from"),
        ("compressed-tensors", {}, "product of two factors|made of coefficients"),
        ("compressed-tensors", {"ratio": None, "bits": 3.0}, "entropy coded|codes of|groups of|does not represent"),
    ],
)
def test_what_a_format_does_not_hold_is_refused(kind, settings, reason, compressed, tmp_path):
    output = compressed("wide llama", **settings)
    with pytest.raises(UnsupportedExportError, match=reason) as error:
        export_artifact(output / "rocket", tmp_path / "later", kind)
    assert "rocket compress ORIGINAL OUT" in str(error.value)
    assert not [*tmp_path.iterdir()]


def test_an_interrupted_export_leaves_nothing(compressed, tmp_path):
    def stop(share, _tensor):
        if share > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_artifact(compressed("llama") / "rocket", tmp_path / "later", "dense", on_step=stop)
    assert not [*tmp_path.iterdir()]


def test_folders_that_are_no_artifact_are_named(compressed, tmp_path):
    output = compressed("llama")
    with pytest.raises(ModelNotFoundError, match=r"did you mean .*rocket"):
        export_artifact(output, tmp_path / "later", "dense")
    with pytest.raises(InvalidConfigError, match="names no stored layers"):
        export_artifact(output / "dense", tmp_path / "later", "dense")
    with pytest.raises(ModelNotFoundError, match="is not a folder"):
        export_artifact(tmp_path / "nowhere", tmp_path / "later", "dense")
    with pytest.raises(InvalidConfigError, match="exists already"):
        export_artifact(output / "rocket", output, "dense")


def test_a_damaged_artifact_is_refused(compressed, tmp_path):
    output = compressed("llama")
    folder = tmp_path / "damaged"
    folder.mkdir()
    for file in (output / "rocket").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    entries = config["quantization_config"]["layers"]
    name = next(name for name, entry in entries.items() if "nnz" in entry)
    entries[name]["nnz"] -= 1
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CorruptCheckpointError, match="copy the files again"):
        export_artifact(folder, tmp_path / "later", "dense")


def test_an_artifact_without_report_is_exported_without_card(compressed, tmp_path):
    output = compressed("llama")
    folder = tmp_path / "bare"
    folder.mkdir()
    for file in (output / "rocket").iterdir():
        if file.name not in {"README.md", "report.json", "report.html"}:
            (folder / file.name).write_bytes(file.read_bytes())
    export_artifact(folder, tmp_path / "later", "dense")
    assert read_report(tmp_path / "later") is None
    assert weights(tmp_path / "later") == weights(output / "dense")
    (folder / "report.json").write_text("{}")
    with pytest.raises(CorruptCheckpointError, match=r"report\.json is damaged"):
        export_artifact(folder, tmp_path / "again", "dense")
