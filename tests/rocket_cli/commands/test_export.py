import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rocket_core.hf import attach_factors
from tests.reference.factored_models import mixed_factors
from tests.reference.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an artifact that no compression has made, without a report."""
    folder = tmp_path_factory.mktemp("artifact")
    model = AutoModelForCausalLM.from_pretrained(save_tiny_model("llama", folder / "original"))
    attach_factors(model, mixed_factors(model)).save_pretrained(folder / "rocket")
    return folder / "rocket"


def test_a_dense_export_has_the_composed_weights(rocket: Callable, artifact: Path, tmp_path: Path) -> None:
    outcome = rocket("export", artifact, tmp_path / "stock", "--to", "dense")

    assert outcome.code == 0
    size = (tmp_path / "stock" / "model.safetensors").stat().st_size
    assert outcome.out == f"dense: {size / 1000:.2f} kB in {tmp_path / 'stock'}\n"
    expected = AutoModelForCausalLM.from_pretrained(artifact).dequantize().state_dict()
    found = load_file(tmp_path / "stock" / "model.safetensors")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert "quantization_config" not in json.loads((tmp_path / "stock" / "config.json").read_text())
    assert not [key for key in found if "weight_" in key]


def test_the_result_is_json_for_programs(rocket: Callable, artifact: Path, tmp_path: Path) -> None:
    outcome = rocket("export", artifact, tmp_path / "stock", "--to", "dense", "--json")

    made = json.loads(outcome.out)
    assert (made["kind"], made["folder"]) == ("dense", "stock")
    assert made["stored_bytes"] == (tmp_path / "stock" / "model.safetensors").stat().st_size
    assert outcome.err == ""


def test_a_misspelled_folder_suggests_the_nearest(rocket: Callable, artifact: Path, tmp_path: Path) -> None:
    outcome = rocket("export", artifact.with_name("rockt"), tmp_path / "stock", "--to", "dense")

    assert outcome.code == 3
    assert f"did you mean {artifact}?" in outcome.err


@pytest.mark.parametrize(
    ("change", "exit_code", "code"),
    [
        ({"--to": "gguf"}, 3, "unsupported_export"),
        ({"--to": "compressed-tensors"}, 2, "invalid_config"),
        ({"artifact": "original"}, 2, "invalid_config"),
        ({"artifact": "."}, 3, "model_not_found"),
        ({"artifact": "nowhere"}, 3, "model_not_found"),
        ({"output": "rocket"}, 2, "invalid_config"),
    ],
)
def test_error_is_one_line_and_json_for_programs(
    rocket: Callable, artifact: Path, tmp_path: Path, change: dict[str, str], exit_code: int, code: str
) -> None:
    given = artifact.parent / change.get("artifact", "rocket")
    output = artifact.parent / change["output"] if "output" in change else tmp_path / "later"

    outcome = rocket("export", given, output, "--to", change.get("--to", "dense"), "--json")

    assert outcome.code == exit_code
    error = json.loads(outcome.out)["error"]
    assert error["code"] == code
    assert outcome.err == f"rocket: error: {error['message']}\n"
    assert list(tmp_path.iterdir()) == []
