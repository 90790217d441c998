"""Advice on folders and files that are not a checkpoint."""

from pathlib import Path

import pytest

from rocket_core.inspection.files.model_advice import advice_on_contents, advice_on_folder, advice_on_path


@pytest.mark.parametrize(
    ("names", "advice"),
    [
        (["model-Q4_K_M.gguf", "README.md"], "--for llama.cpp"),
        (["model.SAFETENSORS"], "add the config.json"),
        (["pytorch_model.bin"], "save_pretrained"),
        (["consolidated.00.pth"], "save_pretrained"),
        (["README.md"], "give a transformers checkpoint"),
        ([], "give a transformers checkpoint"),
    ],
)
def test_advice_says_what_the_files_are(names, advice):
    assert advice in advice_on_contents(names)


def test_a_checkpoint_inside_the_folder_is_suggested(tmp_path):
    for step in ("checkpoint-10", "checkpoint-20"):
        (tmp_path / step).mkdir()
    (tmp_path / "checkpoint-20" / "config.json").touch()
    assert advice_on_folder(tmp_path) == f"did you mean {tmp_path / 'checkpoint-20'}?"


def test_a_file_of_a_checkpoint_leads_to_its_folder(tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).touch()
    assert advice_on_path(tmp_path / "model.safetensors") == f"it is a file; give its folder, {tmp_path}"


def test_a_gguf_file_is_named_as_such(tmp_path):
    (tmp_path / "model.gguf").touch()
    assert "already quantized" in str(advice_on_path(tmp_path / "model.gguf"))


@pytest.mark.parametrize("path", ["exmples/tiny", "examples/tinny", "Examples/tiny"])
def test_one_misspelled_name_of_a_path_is_corrected(tmp_path, path):
    (tmp_path / "examples" / "tiny").mkdir(parents=True)
    assert advice_on_path(tmp_path / path) == f"did you mean {tmp_path / 'examples' / 'tiny'}?"


@pytest.mark.parametrize("path", ["exmples/tiny", "examples/tinny"])
def test_paths_relative_to_the_current_folder_stay_relative(tmp_path, monkeypatch, path):
    (tmp_path / "examples" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert advice_on_path(Path(path)) == "did you mean examples/tiny?"


@pytest.mark.parametrize("path", ["models/tiny", "examples/llama", "exmples/tinny", "/"])
def test_a_path_that_resembles_nothing_has_no_advice(tmp_path, path):
    (tmp_path / "examples" / "tiny").mkdir(parents=True)
    assert advice_on_path(tmp_path / path) is None
