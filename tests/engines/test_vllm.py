"""Exports for vLLM in vLLM on a CPU, which has nothing of Rocket installed: greedy tokens and their probabilities.

Prompts are answered alone, as a batch, and by its OpenAI server over HTTP, with the chat template. vLLM's CPU kernels
take INT8, FP8, and integer codes of 4 bits with AVX-512: for others, reference kernels are registered as a plugin.
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
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.engine_environments import python_of
from benchmarks.rivals import output_of
from rocket_core.sizes import engine_memory
from rocket_core.sizes.context_shape import context_shape
from rocket_core.sizes.memory_fit import MemoryFit
from tests.engines.conftest import (
    MODEL,
    PROGRAMS,
    PROMPTS,
    ROOT,
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
# Inputs that differ by its rounding are rounded to 8 bits differently as well.
ROUNDED = (("vllm-int8", 8.2, 0.5), ("vllm-fp8", 8.2, 0.5), ("vllm-nvfp4", 6.0, 0.5))
FORMATS = (*(("vllm", bits, TOLERANCE) for bits in BITS), *ROUNDED)


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
        # vLLM chooses its kernel for 4 bits also where it fails: on CPUs without its instructions, and on those with
        # AMX for layers of 192 inputs, as here.
        "VLLM_DISABLED_KERNELS": "" if _has_kernel_of_4_bits() else "CPUWNA16LinearKernel",
    }


def _has_kernel_of_4_bits():
    has_amx = torch.cpu.get_capabilities().get("amx_tile", False)
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and not has_amx


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


@pytest.fixture
def with_plugin(environment, tmp_path):
    """Variables of a process of vLLM that finds the plugin of this repository, and what it imports."""
    described = tmp_path / "rocket_compress-0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: rocket-compress\nVersion: 0\n")
    (described / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nrocket = rocket_core.exports.vllm_plugin:register\n"
    )
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path)]
    output_of([str(python_of("vllm")), *install, "accelerate", "jaxtyping", "wadler-lindig"])
    return {**environment, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}


@pytest.mark.parametrize(("engine", "bits", "tolerance"), FORMATS)
def test_vllm_computes_our_reconstruction(exported, environment, engine, bits, tolerance):
    agree_with_vllm(exported(engine, "compressed-tensors", bits=bits), "auto", environment, tolerance)


@pytest.mark.parametrize("target", [{"target_bytes": 1_300_000}, {"bits": 3.0, "storage": "memory"}, {"ratio": 0.3}])
def test_vllm_loads_an_artifact_with_the_plugin(exported, with_plugin, target):
    agree_with_vllm(exported("rocket", "rocket", **target), "rocket", with_plugin, TOLERANCE)


def test_vllm_says_how_to_load_an_artifact(exported, with_plugin):
    folder = exported("rocket", "rocket", ratio=0.3)
    program = [str(python_of("vllm")), str(PROGRAMS / "run_vllm.py"), str(folder), "auto", *PROMPTS]
    done = subprocess.run(program, env=with_plugin, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode != 0
    assert "was compressed by Rocket; add --load-format rocket" in done.stdout + done.stderr


def agree_with_vllm(folder, load_format, environment, tolerance):
    """Check that vLLM computes what our own reading of the files does."""
    program = [str(python_of("vllm")), str(PROGRAMS / "run_vllm.py"), str(folder), load_format]
    found = answers_of([*program, *PROMPTS], environment)
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


_SIZES = {"vocab_size": 2048, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 7, "head_dim": 32}
_SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16384}
_SIZES |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
_LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 64, "q_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
_LATENT |= {"qk_rope_head_dim": 64, "head_dim": 64, "first_k_dense_replace": 7}


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {}),
        ("gemma2", {"sliding_window": 512}),
        ("gemma3_text", {"sliding_window": 512}),
        ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 6}),
        ("deepseek_v3", _LATENT),
    ],
)
def test_vllm_reserves_what_is_counted(family, more, environment, tmp_path, monkeypatch):
    config = AutoConfig.for_model(family, **(_SIZES | more))
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(tmp_path / "model")
    context, at_once = 8000, engine_memory._VLLM_STEP[0]
    program = [str(python_of("vllm")), str(PROGRAMS / "run_vllm_memory.py"), str(tmp_path / "model")]
    found = answers_of([*program, str(context), str(at_once)], environment)
    # On CPUs blocks have another size for most families.
    monkeypatch.setattr(engine_memory, "_VLLM_BLOCK", found["block"])
    fit = MemoryFit(memory_bytes=2**33, context=context)
    assert found["bytes"] == engine_memory.cache_bytes(context_shape(config.to_dict()), fit, "vllm", 2)
