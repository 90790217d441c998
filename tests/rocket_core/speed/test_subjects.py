import json
import shutil
from pathlib import Path

import pytest

from rocket_core.errors import CheckpointFormatError, InvalidConfigError, ModelNotFoundError
from rocket_core.speed import find_subject
from tests.reference.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model("llama", tmp_path_factory.mktemp("models") / "llama")


def quantized(model, folder, method):
    """Copy a model and declare its weights to be quantized."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": method}}))
    return folder


def test_a_checkpoint_is_dense(model):
    subject = find_subject(model, "llama", "packed")

    assert (subject.name, subject.path, subject.form, subject.runtime) == ("llama", model, "dense", "transformers")
    assert subject.packing == "default"
    assert subject.stored_bytes == (model / "model.safetensors").stat().st_size


@pytest.mark.parametrize(("method", "form", "packing"), [("rocket", "rocket", "packed"), ("gptq", "gptq", "default")])
def test_quantized_folders_are_named_by_their_method(model, tmp_path, method, form, packing):
    subject = find_subject(quantized(model, tmp_path / "it", method), "it", "packed")

    assert (subject.form, subject.packing) == (form, packing)


def test_a_gguf_file_is_found_in_its_folder(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "mmproj.gguf").touch()

    subject = find_subject(tmp_path, "there")

    assert subject == find_subject(tmp_path / "model.gguf", "there")
    assert (subject.form, subject.runtime, subject.stored_bytes) == ("gguf", "llama.cpp", 4)


def test_two_gguf_files_must_be_told_apart(tmp_path):
    for name in ("one.gguf", "two.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")

    with pytest.raises(InvalidConfigError, match="name one of them"):
        find_subject(tmp_path, "there")


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "model.gguf").touch()

    with pytest.raises(CheckpointFormatError, match="is empty"):
        find_subject(tmp_path / "model.gguf", "it")


def test_the_output_of_a_compression_names_its_exports(model, tmp_path):
    shutil.copytree(model, tmp_path / "out" / "dense")

    with pytest.raises(ModelNotFoundError, match="name one of its folders: dense"):
        find_subject(tmp_path / "out", "out")


@pytest.mark.parametrize("path", ["missing", "notes.txt", "empty"])
def test_what_is_no_model_is_refused(tmp_path, path):
    (tmp_path / "notes.txt").write_text("no model")
    (tmp_path / "empty").mkdir()

    with pytest.raises(ModelNotFoundError, match=f"{path} .*check the path"):
        find_subject(tmp_path / path, path)


def test_home_is_expanded(model, monkeypatch):
    monkeypatch.setenv("HOME", str(model.parent))

    assert find_subject(Path("~/llama"), "~/llama").path == model
