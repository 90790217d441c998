"""Exports for ONNX Runtime GenAI on a CPU, with nothing of Rocket installed: logits, greedy tokens, a batch, chat.

The model builder is run as reports say. For a CPU, with exact products, logits are those of our reconstruction; as for
GPUs, in float16, within its rounding.
"""

import os
import shlex
import subprocess

import pytest
import torch

from benchmarks.engine_environments import python_of
from rocket_core.exports.artifact_folder import read_report
from rocket_core.report.run_commands import run_commands
from tests.engines.conftest import PROGRAMS, PROMPTS, agree_on_prompts, agree_on_tokens, answers_of, own_model

pytestmark = pytest.mark.engines
WAYS = {"float32": ("cpu", ["accuracy_level=0"], 1e-4), "float16": ("cuda", [], 0.02), "inputs": ("cpu", [], 0.15)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bits", [4.0, 5.0, 9.0])
def test_onnx_runtime_computes_our_reconstruction(exported, tmp_path, bits, way):
    folder = exported("onnx", "olive", bits=bits)
    device, options, tolerance = WAYS[way]
    (command,) = run_commands(read_report(folder), "olive", str(folder))
    _, *words = shlex.split(command.text, comments=True)
    build = [device if word == "cuda" else word for word in words] + options
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run([str(python_of("onnx")), *build], check=True, cwd=tmp_path, env=variables, timeout=600)
    if device == "cuda":
        # Next to the same weights, the tables of positions, and alignment.
        data = (tmp_path / "onnx" / "model.onnx.data").stat().st_size
        assert data < 1.01 * (folder / "model.safetensors").stat().st_size
    program = [str(python_of("onnx")), str(PROGRAMS / "run_onnx.py"), "onnx", "<|endoftext|>", *PROMPTS]
    found = answers_of(program, variables, tmp_path)
    agree_on_prompts(folder, found)
    model = own_model(folder)
    for ids, logits, *answers in zip(found["ids"], found["logits"], found["tokens"], found["batch"], strict=True):
        with torch.no_grad():
            own = model(torch.tensor([ids])).logits[0]
        assert float((torch.tensor(logits) - own).square().mean().sqrt()) <= tolerance
        for tokens in answers:
            agree_on_tokens(model, ids, tokens, 5 * tolerance)
