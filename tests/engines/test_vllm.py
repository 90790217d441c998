"""Exports for vLLM in vLLM on a CPU, which has nothing of Rocket installed: greedy tokens and their probabilities.

Prompts are answered alone, as a batch, and by its OpenAI server over HTTP, with the chat template. vLLM's CPU kernels
take integer codes of 4 bits and FP8: for integers of 8 bits and NVFP4, reference kernels are registered as a plugin.
"""

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from contextlib import contextmanager

import pytest
import torch

from benchmarks.engine_environments import python_of
from tests.engines.conftest import (
    PROGRAMS,
    PROMPTS,
    agree_on_prompts,
    agree_on_tokens,
    answers_of,
    log_chances,
    own_model,
)

pytestmark = pytest.mark.engines
# vLLM computes in bfloat16.
TOLERANCE = 0.2
BITS = (4.4, 5.0)
# Inputs that differ by its rounding are rounded to FP8 differently as well.
FORMATS = (*(("vllm", bits, TOLERANCE) for bits in BITS), ("vllm-fp8", 8.2, 0.5), ("vllm-nvfp4", 6.0, 0.5))


@pytest.fixture
def environment(tmp_path):
    """Variables of a process of vLLM, with the reference kernel among its plugins."""
    described = tmp_path / "reference_kernel-0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: reference-kernel\nVersion: 0\n")
    (described / "entry_points.txt").write_text("[vllm.general_plugins]\nreference = reference_kernel:register\n")
    shutil.copyfile(PROGRAMS / "reference_kernel.py", tmp_path / "reference_kernel.py")
    return {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }


@contextmanager
def served(folder, environment, log):
    """Serve a folder with vLLM's OpenAI server, and yield a function that posts to it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # `vllm serve` looks for a package of the name vllm, and this one is called vllm-cpu.
    module = ["-m", "vllm.entrypoints.openai.api_server"]
    program = [str(python_of("vllm")), *module, "--model", str(folder), "--served-model-name", "model"]
    options = ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "128", "--enforce-eager"]
    with log.open("w") as out:
        server = subprocess.Popen([*program, *options], env=environment, stdout=out, stderr=out)

    def post(path, body):
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.load(response)

    try:
        for _ in range(600):
            assert server.poll() is None, log.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(1)
        yield post
    finally:
        server.terminate()
        server.wait(timeout=60)


@pytest.mark.parametrize(("engine", "bits", "tolerance"), FORMATS)
def test_vllm_computes_our_reconstruction(exported, environment, engine, bits, tolerance):
    folder = exported(engine, "compressed-tensors", bits=bits)
    found = answers_of([str(python_of("vllm")), str(PROGRAMS / "run_vllm.py"), str(folder), *PROMPTS], environment)
    agree_on_prompts(folder, found)
    model = own_model(folder)
    for ids, tokens, chances, together in zip(
        found["ids"], found["tokens"], found["chances"], found["batch"], strict=True
    ):
        own = log_chances(model, ids + tokens)[len(ids) - 1 : -1].gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert chances == pytest.approx(own.tolist(), abs=tolerance)
        for answer in (tokens, together):
            agree_on_tokens(model, ids, answer, tolerance)


def test_vllm_serves_an_export_over_http(exported, environment, tmp_path):
    folder = exported("vllm", "compressed-tensors", bits=BITS[0])
    model = own_model(folder)
    with served(folder, environment, tmp_path / "log") as post:
        asked = {"model": "model", "max_tokens": 12, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
        answers = post("/v1/completions", {**asked, "prompt": PROMPTS})["choices"]
        chat = {**asked, "messages": [{"role": "user", "content": PROMPTS[0]}]}
        talked = post("/v1/chat/completions", chat)
    for choice in answers:
        agree_on_tokens(model, choice["prompt_token_ids"], choice["token_ids"], TOLERANCE)
    agree_on_tokens(model, talked["prompt_token_ids"], talked["choices"][0]["token_ids"], TOLERANCE)
