"""The early check compared with the library: the same errors, before torch is imported."""

import json
import os
import subprocess
import sys

import pytest

from rocket_core import compress, compression_config
from rocket_core.errors import (
    InfeasibleBudgetError,
    InvalidConfigError,
    ModelNotFoundError,
    RocketError,
    UnknownDatasetError,
)
from rocket_core.hub.requests import check_request
from tests.reference.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model("llama", tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"ratio": 0.3, "calibration": {"dataset": "wikitxt2"}}, UnknownDatasetError),
        ({"ratio": 0.3, "calibration": {"dataset": "missing.txt"}}, UnknownDatasetError),
        ({"ratio": 0.3, "evaluate": {"dataset": "buildin"}}, UnknownDatasetError),
        ({"ratio": 0.999}, InfeasibleBudgetError),
        ({"target_bytes": 100}, InfeasibleBudgetError),
        ({"ratio": 0.3, "ignore": ("*.nothing",)}, RocketError),
        ({"ratio": 0.3, "calibration": {"dataset": "synthetic"}}, UnknownDatasetError),
        ({"ratio": 0.3, "calibration": {"sequence_length": 2**20}}, InvalidConfigError),
        ({"ratio": 0.3, "evaluate": {"prompts": ("word " * 300,)}}, InvalidConfigError),
        ({"ratio": 0.3, "include": ("vision",)}, InvalidConfigError),
    ],
)
def test_an_early_refusal_is_the_same_as_in_a_run(model, tmp_path, settings, error):
    config = compression_config(**settings)
    with pytest.raises(error) as early:
        check_request(str(model), config)
    with pytest.raises(type(early.value)):
        compress(str(model), tmp_path / "out", config)


@pytest.mark.parametrize("name", ["misspelled folder", "a/b/c"])
def test_a_misspelt_model_is_refused(name):
    with pytest.raises(ModelNotFoundError, match="neither a folder nor a repository id"):
        check_request(name, compression_config(ratio=0.3))


def test_a_misspelt_folder_is_not_taken_for_a_repository(model, monkeypatch):
    monkeypatch.chdir(model.parent.parent)
    config = compression_config(ratio=0.3)
    misspelt = f"{model.parent.name}/tinny"
    with pytest.raises(ModelNotFoundError, match=f"did you mean {model.parent.name}/tiny.*--revision main"):
        check_request(misspelt, config)
    check_request(misspelt, config, revision="main")
    check_request(f"{model.parent.name}/other", config)


def test_advice_on_a_file_is_a_sentence_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "notes").touch()
    with pytest.raises(ModelNotFoundError, match=r"give a transformers checkpoint\. To get the repository"):
        check_request("some/notes", compression_config(ratio=0.3))


def test_a_folder_has_no_revision(model):
    with pytest.raises(ModelNotFoundError, match="has no revision 'main'"):
        check_request(str(model), compression_config(ratio=0.3), revision="main")


def test_a_repository_id_is_not_looked_up():
    check_request("namespace/name", compression_config(ratio=0.3))


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        check_request(str(tmp_path), compression_config(ratio=0.3))


def test_a_valid_request_passes(model):
    check_request(str(model), compression_config(ratio=0.3))


@pytest.mark.parametrize(
    "arguments", [("--ratio", "0.3", "--calibration", "wikitxt2"), ("--size", "100"), ("--ratio", "0.999")]
)
@pytest.mark.slow
def test_the_command_refuses_without_torch(model, tmp_path, arguments):
    code = (
        "import sys\n"
        "from rocket_cli.main import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit as end:\n    print(end.code, 'torch' in sys.modules)\n"
    )
    command = [sys.executable, "-c", code, "compress", str(model), str(tmp_path / "out"), *arguments]
    result = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, check=True)
    code, has_torch = result.stdout.split()
    assert int(code) in {2, 3, 4}
    assert has_torch == "False", json.dumps(result.stderr)
