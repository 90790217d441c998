"""Originals that exist in few bits, from the command line to generated text."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import rocket_core.hf  # noqa: F401 - registers the format of artifacts
from tests.reference import gguf_models
from tests.reference.few_bit_models import save_few_bits
from tests.rocket_core.exports.test_gguf_engine import export

SMALL = ("--samples", "6", "--sequence-length", "32", "--device", "cpu", "--json")


@pytest.mark.parametrize(("scheme", "size"), [("deepseek_v3", 400_000), ("mxfp4", 70_000)])
def test_an_original_in_few_bits_becomes_a_model_of_a_size(
    scheme: str, size: int, rocket: Callable, tmp_path: Path
) -> None:
    folder, output = save_few_bits(scheme, tmp_path / "model"), tmp_path / "out"
    outcome = rocket("compress", folder, output, "--size", str(size), *SMALL)
    assert outcome.code == 0, outcome.err
    written = (output / "rocket" / "model.safetensors").stat().st_size
    assert 0.9 * size < written <= size < (folder / "model.safetensors").stat().st_size
    assert json.loads(outcome.out)["totals"]["original_bits"] == pytest.approx(
        8.0 if scheme == "deepseek_v3" else 4.25, abs=0.1
    )
    model, report = AutoModelForCausalLM.from_pretrained(output / "rocket", output_loading_info=True)
    assert not any(report.values())
    tokens = torch.arange(8)[None] + 100
    assert model.generate(tokens, max_new_tokens=4, do_sample=False).shape == (1, 12)


def test_a_size_larger_than_the_original_is_nothing_to_do(rocket: Callable, tmp_path: Path) -> None:
    folder = save_few_bits("mxfp4", tmp_path / "model")
    outcome = rocket("compress", folder, tmp_path / "out", "--size", "90kB", *SMALL)
    assert (outcome.code, (tmp_path / "out").exists()) == (2, False)
    assert "nothing is to be done: the model takes" in outcome.err


def test_a_gguf_file_becomes_a_model_of_a_size(rocket: Callable, tmp_path: Path) -> None:
    gguf_models.save("llama", tmp_path / "original", hidden_size=256, intermediate_size=256)
    export(tmp_path / "original", tmp_path / "model.gguf", choose=lambda _key, _shape: "Q8_0")
    output = tmp_path / "out"
    outcome = rocket("compress", tmp_path / "model.gguf", output, "--size", "800kB", *SMALL[:-1])
    assert outcome.code == 0, outcome.err
    assert "model.gguf is already quantized (GGUF, mostly Q8_0, 8.5" in outcome.err
    assert sorted(path.name for path in output.iterdir()) == ["report.html", "report.json", "rocket"]
    model, report = AutoModelForCausalLM.from_pretrained(output / "rocket", output_loading_info=True)
    assert not any(report.values())
    assert model.generate(torch.arange(8)[None] + 100, max_new_tokens=4, do_sample=False).shape == (1, 12)


def test_a_gguf_file_that_is_not_read_leaves_nothing(rocket: Callable, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    outcome = rocket("compress", tmp_path / "model.gguf", tmp_path / "out", "--ratio", "0.3", *SMALL)
    assert (outcome.code, "damaged" in outcome.err, (tmp_path / "out").exists()) == (6, True, False)
    outcome = rocket("compress", tmp_path / "model.gguf", tmp_path / "out", "--ratio", "0.3", "--revision", "main")
    assert "is local and has no revision 'main'" in outcome.err
    outcome = rocket("compress", tmp_path / "modl.gguf", tmp_path / "out", "--ratio", "0.3")
    assert (outcome.code, "modl.gguf" in outcome.err) == (3, True)
