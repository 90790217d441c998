"""Checkpoints that are made from GGUF files: the same model, or a refusal that says what would be lost."""

from dataclasses import replace
from unicodedata import normalize

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rocket_core.errors import CheckpointFormatError, CorruptCheckpointError, UnsupportedArchitectureError
from rocket_core.exports.gguf_checkpoint import write_gguf_checkpoint
from rocket_core.exports.gguf_file import GgufValue
from tests.reference import gguf_models
from tests.rocket_core.exports.test_gguf_engine import TEXTS, export

# With rows of whole blocks, and more layers than a window's period.
SIZES = {"num_hidden_layers": 6}


def save(name, folder, **changes):
    """Write a model in bfloat16, and return it as it is read again."""
    model, _ = gguf_models.save(name, folder, **SIZES, **changes)
    model.to(torch.bfloat16).save_pretrained(folder)
    return load(folder)


def load(folder):
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


def changed(monkeypatch, metadata=None, computed=None):
    """Make `export` write other metadata and computed tensors than it would."""
    from rocket_core.exports import gguf_model

    def plan(*args, **kwargs):
        made = gguf_model.plan_gguf(*args, **kwargs)
        kept = {key: value for key, value in (made.metadata | (metadata or {})).items() if value is not None}
        return replace(made, metadata=kept, computed=dict(made.computed) | (computed or {}))

    monkeypatch.setattr("tests.rocket_core.exports.test_gguf_engine.plan_gguf", plan)


@pytest.mark.parametrize("name", sorted(gguf_models.MODELS.keys() - {"gpt_oss"}))
def test_the_checkpoint_is_the_model_that_was_written(name, tmp_path):
    original = save(name, tmp_path / "original")
    export(tmp_path / "original", tmp_path / "model.gguf")
    (tmp_path / "made").mkdir()
    assert write_gguf_checkpoint(tmp_path / "model.gguf", tmp_path / "made") == "GGUF, mostly F32, 32 bits"
    tokens = torch.arange(3, 190)[None]
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "made")(tokens).logits, original(tokens).logits)


@pytest.mark.parametrize("kind", gguf_models.TOKENIZERS)
@pytest.mark.parametrize("begins", [True, False])
def test_the_tokenizer_cuts_text_as_the_original(kind, begins, tmp_path):
    save("llama", tmp_path / "original")
    original = gguf_models.save_tokenizer(kind, tmp_path / "original", begins=begins)
    export(tmp_path / "original", tmp_path / "model.gguf")
    (tmp_path / "made").mkdir()
    write_gguf_checkpoint(tmp_path / "model.gguf", tmp_path / "made")
    made = AutoTokenizer.from_pretrained(tmp_path / "made")
    # Files do not say how text is normalized, and llama.cpp does not.
    for text in (normalize("NFC", text) for text in TEXTS):
        assert made(text).input_ids == original(text).input_ids, text
    assert made.chat_template == gguf_models.CHAT
    assert (made.eos_token_id, made.pad_token_id) == (original.eos_token_id, original.pad_token_id)


def test_codes_are_decoded(tmp_path):
    save("llama", tmp_path / "original", hidden_size=256, intermediate_size=256)
    rounded = export(tmp_path / "original", tmp_path / "model.gguf", choose=lambda key, shape: "Q4_K")
    (tmp_path / "made").mkdir()
    assert write_gguf_checkpoint(tmp_path / "model.gguf", tmp_path / "made").startswith("GGUF, mostly Q4_K, 4.5")
    for key, parameter in load(tmp_path / "made").named_parameters():
        assert torch.equal(parameter, rounded[key].to(torch.bfloat16).float()), key


@pytest.mark.parametrize(
    ("name", "metadata", "computed", "words"),
    [
        ("llama", {"llama.rope.scaling.attn_factor": GgufValue("float32", 1.5)}, {}, r"rope.scaling.attn_factor 1.5"),
        ("llama", {"llama.attention.sliding_window": GgufValue("uint32", 16)}, {}, "sliding_window 16"),
        ("llama", {"llama.attention.value_length": GgufValue("uint32", 8)}, {}, r"value_length 8 \(it would have 16\)"),
        ("llama3", {}, {"rope_freqs.weight": tuple(float(n + 1) for n in range(8))}, "factors in rope_freqs.weight"),
        ("llama", {"llama.block_count": None}, {}, r"lack a value.*KeyError"),
        ("llama", {"llama.embedding_length": GgufValue("string", "wide")}, {}, "malformed"),
        ("llama", {"split.count": GgufValue("uint32", 3)}, {}, r"one of 3 parts.*llama-gguf-split --merge"),
    ],
)
def test_what_would_be_lost_is_refused(name, metadata, computed, words, tmp_path, monkeypatch):
    save(name, tmp_path / "original")
    changed(monkeypatch, metadata, computed)
    export(tmp_path / "original", tmp_path / "model.gguf")
    (tmp_path / "made").mkdir()
    with pytest.raises(CheckpointFormatError, match=words):
        write_gguf_checkpoint(tmp_path / "model.gguf", tmp_path / "made")


@pytest.mark.parametrize(
    ("name", "metadata", "words"),
    [
        ("gpt_oss", {}, "GGUF files of the architecture gpt-oss with experts are not read; those of gemma, gemma2"),
        ("llama", {"general.architecture": GgufValue("string", "mamba")}, "of the architecture mamba are not read"),
        ("llama", {"tokenizer.ggml.model": GgufValue("string", "t5")}, "its tokenizer is t5"),
        (
            "llama",
            {"tokenizer.ggml.model": GgufValue("string", "gpt2"), "tokenizer.ggml.pre": GgufValue("string", "viking")},
            "cuts text into words, is 'viking'",
        ),
    ],
)
def test_models_of_other_kinds_are_refused(name, metadata, words, tmp_path, monkeypatch):
    save(name, tmp_path / "original")
    changed(monkeypatch, metadata)
    export(tmp_path / "original", tmp_path / "model.gguf")
    (tmp_path / "made").mkdir()
    with pytest.raises(UnsupportedArchitectureError, match=words):
        write_gguf_checkpoint(tmp_path / "model.gguf", tmp_path / "made")


def test_damaged_files_are_refused(tmp_path):
    save("llama", tmp_path / "original")
    export(tmp_path / "original", tmp_path / "model.gguf")
    whole = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "made").mkdir()
    for content in (b"", b"GGUF", whole[:200], whole[:-4000], b"PK" + whole[2:]):
        (tmp_path / "model.gguf").write_bytes(content)
        with pytest.raises(CorruptCheckpointError, match=r"model\.gguf is not a GGUF file, or damaged"):
            write_gguf_checkpoint(tmp_path / "model.gguf", tmp_path / "made")
