"""Folders with a GGUF file, which are evaluated with the configuration and the tokenizer of their original."""

import importlib.util
import json

import pytest
from safetensors.torch import load_file

from rocket_core.errors import CheckpointFormatError, CorruptCheckpointError, InvalidConfigError, RocketError
from rocket_core.evaluation import evaluate_text
from rocket_core.exports.gguf_model import plan_gguf
from rocket_core.exports.gguf_writer import GgufSource, write_model
from tests.reference import gguf_models

pytest.importorskip("gguf", reason="transformers reads GGUF files with it")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original")
    gguf_models.save("llama", folder)
    return folder


def write(original, folder, *, left_out=()):
    """Write the model as a GGUF file in float32, and return the folder."""
    folder.mkdir()
    sources = [
        GgufSource(key=key, shape=tuple(tensor.shape), storage="F32", read=lambda tensor=tensor: tensor)
        for key, tensor in load_file(original / "model.safetensors").items()
        if key not in left_out
    ]
    config = json.loads((original / "config.json").read_text())
    write_model(folder / "any-name.gguf", plan_gguf(config, original), sources)
    return folder


@pytest.fixture
def exported(original, tmp_path):
    return write(original, tmp_path / "exported")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("Once upon a time there was a text. " * 20)
    return path


def test_a_file_with_the_dense_weights_is_no_further_away(original, exported, text):
    found = evaluate_text(exported, text, sequence_length=32, limit=3, against=original, device="cpu")
    assert found.difference.kl_divergence < 1e-9
    assert found.difference.top1_agreement == 1
    assert found.perplexity == pytest.approx(found.dense.perplexity, rel=1e-5)
    assert found.model == str(exported)


def test_without_its_original_a_file_is_refused(exported, text):
    with pytest.raises(InvalidConfigError, match="configuration and the tokenizer of its dense original; name that"):
        evaluate_text(exported, text, sequence_length=32, limit=3)


def test_without_the_package_the_extra_is_named(original, exported, text, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "rocket_core.evaluation.models.find_spec", lambda name: None if name == "gguf" else find_spec(name)
    )
    with pytest.raises(InvalidConfigError, match=r"gguf needs gguf: pip install 'rocket-compress\[gguf\]'"):
        evaluate_text(exported, text, sequence_length=32, limit=3, against=original)


def test_a_folder_with_two_files_is_refused(original, exported, text):
    (exported / "second.gguf").touch()
    with pytest.raises(CheckpointFormatError, match=r"2 GGUF files \(any-name.gguf, second.gguf\)"):
        evaluate_text(exported, text, sequence_length=32, limit=3, against=original)


def test_a_missing_tensor_is_not_replaced_by_random_numbers(original, text, tmp_path):
    lacking = "model.layers.1.mlp.up_proj.weight"
    folder = write(original, tmp_path / "lacking", left_out=[lacking])
    with pytest.raises(CorruptCheckpointError, match=f"lacks 1 weights, first {lacking}"):
        evaluate_text(folder, text, sequence_length=32, limit=3, against=original)


@pytest.mark.parametrize("kept", [0, 3, 1000, 0.5, 0.99])
def test_a_cut_file_is_an_error(original, exported, text, kept):
    file = exported / "any-name.gguf"
    whole = file.read_bytes()
    file.write_bytes(whole[: kept if isinstance(kept, int) else int(kept * len(whole))])
    with pytest.raises(RocketError) as raised:
        evaluate_text(exported, text, sequence_length=32, limit=3, against=original)
    assert str(exported) in str(raised.value)
