"""Files of mixtures that llama.cpp and transformers run."""

import re

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.reference import gguf_models
from tests.reference.llama_cpp import Engine
from tests.rocket_core.exports.test_gguf_engine import TEXTS, agree, export, reconstruction

SIZES = {"hidden_size": 256, "intermediate_size": 256, "initializer_range": 0.05, "num_hidden_layers": 1}
QWEN = SIZES | {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 512}
WIDE = {
    "mixtral": SIZES,
    "qwen2_moe": QWEN,
    "qwen3_moe": QWEN | {"head_dim": 128},
    "olmoe": SIZES,
    "gpt_oss": SIZES | {"head_dim": 64},
}


def types_of_tensors():
    """Return a function that gives the experts of a tensor one type, and routers none."""
    types, kinds = {}, iter(("Q6_K", "Q4_K", "Q8_0", "Q5_0") * 20)

    def choose(key, shape):
        tensor = re.sub(r"experts\.\d+", "experts", key)
        routes = tensor.endswith((".gate.weight", ".router.weight", "shared_expert_gate.weight"))
        return types.setdefault(tensor, "F32" if routes else next(kinds))

    return choose


@pytest.fixture(scope="module", params=gguf_models.MIXTURES)
def mixture(request, tmp_path_factory):
    """Return name and tokenizer of a mixture, its file, the rounded weights, and the model that has them."""
    folder = tmp_path_factory.mktemp(request.param)
    _, tokenizer = gguf_models.save(request.param, folder, **WIDE[request.param])
    rounded = export(folder, folder / "model.gguf", types_of_tensors())
    return request.param, tokenizer, folder / "model.gguf", rounded, reconstruction(folder, rounded, folder / "rounded")


def test_llama_cpp_runs_rounded_experts(mixture):
    _, tokenizer, path, _, model = mixture
    prompt = tokenizer(TEXTS[0])["input_ids"]
    agree(model, prompt, *Engine(path).greedy(prompt, 4))


def test_experts_are_parts_of_one_tensor(mixture):
    name, _, path, rounded, _ = mixture
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    names = {"up": "w3", "gate": "w1", "down": "w2"} if name == "mixtral" else {}
    module = "block_sparse_moe" if name == "mixtral" else "mlp"
    for projection in ("gate", "up", "down"):
        tensor = found[f"blk.0.ffn_{projection}_exps.weight"]
        whole = gguf.dequantize(tensor.data, tensor.tensor_type)
        part = names.get(projection, f"{projection}_proj")
        for expert in range(gguf_models.EXPERTS):
            ours = rounded[f"model.layers.0.{module}.experts.{expert}.{part}.weight"]
            assert np.array_equal(whole[expert], ours.numpy())
    router = found["blk.0.ffn_gate_inp.weight"]
    assert router.tensor_type == gguf.GGMLQuantizationType.F32
    assert np.array_equal(
        router.data, rounded[f"model.layers.0.{module}.{'router' if name == 'gpt_oss' else 'gate'}.weight"].numpy()
    )


def test_transformers_loads_rounded_experts(mixture):
    name, _, path, _, model = mixture
    # It does not read the size of experts from files.
    arguments = {"gguf_file": path.name, "config": model.config, "dtype": torch.float32}
    if name not in ("qwen2_moe", "qwen3_moe"):
        with pytest.raises((NotImplementedError, TypeError, ValueError)):
            AutoModelForCausalLM.from_pretrained(path.parent, **arguments)
        return
    state = AutoModelForCausalLM.from_pretrained(path.parent, **arguments).state_dict()
    for key, tensor in model.state_dict().items():
        torch.testing.assert_close(state[key], tensor, rtol=0, atol=1e-6, msg=key)
