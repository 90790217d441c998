"""Files that llama.cpp and transformers run."""

import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rocket_core.experts import unfuse
from rocket_core.exports.gguf_blocks import pack_blocks
from rocket_core.exports.gguf_model import plan_gguf
from rocket_core.exports.gguf_writer import GgufSource, write_model
from rocket_core.linalg.block_scales import search_block_scales
from rocket_core.linalg.rounding import round_to_nearest
from rocket_core.sizes.block_types import BLOCK_FORMATS, block_types_for
from tests.reference import gguf_models
from tests.reference.llama_cpp import Engine

TEXTS = (
    "A simple statement is comprised within a single logical line.",
    "",
    " two  spaces,   three\tand a tab\n\n\nlines \r\n end ",
    "It's 12345678 and 3.14, isn't it? I'LL say 'tis 007!",
    "Füße, naïve façade, Привет мир, 你好世界, 🙂🙃 e\u0301",
    "<|call|>f(x)<think>why?</s> now<s>",
    "x = [i ** 2 for i in range(10)]  # camelCaseWords HTTPServer",
)


def tensors_of(folder):
    """Return the tensors of a checkpoint; those of experts that transformers stores in one tensor, each."""
    if json.loads((folder / "config.json").read_text())["model_type"] != "gpt_oss":
        return load_file(folder / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder)
    unfuse(model)
    return model.state_dict()


def export(folder, path, choose=lambda key, shape: "F32"):
    """Write a model with every matrix rounded to nearest, and return the rounded weights."""
    plan = plan_gguf(json.loads((folder / "config.json").read_text()), folder, name="test")
    rounded, sources = {}, []
    for key, tensor in tensors_of(folder).items():
        storage = choose(key, tuple(tensor.shape)) if tensor.ndim == 2 else "F32"
        read, rounded[key] = tensor, tensor.float()
        if storage in BLOCK_FORMATS:
            weight = tensor.float().T
            scales = search_block_scales(weight, torch.ones(len(weight)), BLOCK_FORMATS[storage])
            blocks = round_to_nearest(weight, scales)
            read, rounded[key] = pack_blocks(blocks), blocks.rows(torch.float32)
        sources.append(GgufSource(key=key, shape=tuple(tensor.shape), storage=storage, read=lambda read=read: read))
    written = write_model(path, plan, sources)
    sizes = [(source.key, source.shape, source.storage) for source in sources]
    assert written == path.stat().st_size == plan.file_bytes(sizes)
    return rounded


def reconstruction(folder, rounded, copy):
    """Return the model with rounded weights, out of a checkpoint of them."""
    if "model.layers.0.self_attn.sinks" in rounded:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        unfuse(model)
        model.load_state_dict(rounded)
        return model
    copy.mkdir()
    (copy / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file({key: tensor.contiguous() for key, tensor in rounded.items()}, copy / "model.safetensors")
    return AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32).eval()


def greedy(model, prompt, count):
    """Return the most likely tokens after a prompt, and the logarithms of their probabilities."""
    ids, chances = list(prompt), []
    for _ in range(count):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1].double().log_softmax(dim=0)
        ids.append(int(logits.argmax()))
        chances.append(float(logits.max()))
    return ids[len(prompt) :], chances


def agree(model, prompt, tokens, chances):
    """Check that a model finds tokens about as likely as llama.cpp does, which rounds inputs of layers to 8 bits."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].double().log_softmax(dim=-1)
    own = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert chances == pytest.approx(own.tolist(), abs=0.1)
    assert bool((logits.amax(dim=1) - own < 0.1).all())


@pytest.mark.parametrize("name", gguf_models.MODELS)
def test_llama_cpp_computes_what_transformers_does(name, tmp_path):
    model, tokenizer = gguf_models.save(name, tmp_path)
    path = tmp_path / "model.gguf"
    export(tmp_path, path)
    engine = Engine(path)
    prompt = tokenizer(" ".join(TEXTS))["input_ids"][:40]
    assert engine.tokens(TEXTS[0]) == tokenizer(TEXTS[0])["input_ids"]
    tokens, chances = greedy(model, prompt, 24)
    own_tokens, own_chances = engine.greedy(prompt, 24)
    ends = tokenizer.eos_token_id  # which the engine leaves out
    length = tokens.index(ends) if ends in tokens else len(tokens)
    assert length > 8
    assert own_tokens[:length] == tokens[:length]
    assert own_chances[:length] == pytest.approx(chances[:length], abs=3e-3)


@pytest.mark.parametrize("kind", gguf_models.TOKENIZERS)
def test_llama_cpp_splits_texts_into_the_same_tokens(kind, tmp_path):
    _, tokenizer = gguf_models.save("qwen2", tmp_path, tokenizer=kind, num_hidden_layers=1)
    path = tmp_path / "model.gguf"
    export(tmp_path, path)
    engine = Engine(path)
    for text in TEXTS:
        if kind != "qwen2" or text.isascii():  # llama.cpp does not compose characters
            assert engine.tokens(text) == tokenizer(text)["input_ids"], text


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2", "phi3", "mistral"])
def test_transformers_loads_the_rounded_weights(name, tmp_path):
    # transformers does not read the size of heads from files of some families.
    sizes = {"qwen3": {"head_dim": 128}, "mistral": {"head_dim": None}}.get(name, {})
    gguf_models.save(name, tmp_path, hidden_size=256, intermediate_size=512, **sizes)
    kinds = iter(block_types_for(256) * 10)
    path = tmp_path / "model.gguf"
    rounded = export(tmp_path, path, lambda key, shape: next(kinds))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    state = loaded.state_dict()
    assert loaded.config.num_hidden_layers == 3
    for key, tensor in rounded.items():
        torch.testing.assert_close(state[key], tensor, rtol=0, atol=1e-6, msg=key)


@pytest.mark.parametrize("storage", ["Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "IQ4_NL", "K"])
def test_llama_cpp_runs_rounded_weights(storage, tmp_path):
    folder = tmp_path / "model"
    gguf_models.save("llama", folder, hidden_size=256, intermediate_size=512, initializer_range=0.05)
    kinds = iter(("Q6_K", "Q5_K", "Q4_K", "IQ4_XS", "Q3_K", "Q2_K") * 10)
    path = tmp_path / "model.gguf"
    rounded = export(folder, path, lambda key, shape: next(kinds) if storage == "K" else storage)
    model, tokenizer = reconstruction(folder, rounded, tmp_path / "rounded"), AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer(TEXTS[0])["input_ids"]
    agree(model, prompt, *Engine(path).greedy(prompt, 4))


def test_a_trained_model_says_the_same(tmp_path):
    folder, path = gguf_models.TEXT.parent, tmp_path / "model.gguf"
    kinds = {"down_proj": "Q6_K", "embed": "Q8_0", "v_proj": "Q8_0", "gate": "Q5_1", "q_proj": "IQ4_NL", "": "Q5_0"}
    rounded = export(folder, path, lambda key, shape: next(kind for part, kind in kinds.items() if part in key))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("The following example shows how to open a file and")["input_ids"]
    tokens, chances = Engine(path).greedy(prompt, 32)
    agree(reconstruction(folder, rounded, tmp_path / "rounded"), prompt, tokens, chances)
    assert len(set(tokens)) > 8


def test_equal_models_make_equal_files(tmp_path):
    gguf_models.save("llama3", tmp_path)
    for name in ("one.gguf", "two.gguf"):
        export(tmp_path, tmp_path / name, lambda key, shape: "Q8_0")
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()


def test_the_reader_of_the_package_finds_everything(tmp_path):
    _, tokenizer = gguf_models.save("llama", tmp_path)
    rounded = export(tmp_path, tmp_path / "model.gguf", lambda key, shape: "F16")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    assert reader.get_field("tokenizer.chat_template").contents() == gguf_models.CHAT
    assert reader.get_field("tokenizer.ggml.bos_token_id").contents() == tokenizer.bos_token_id
    found = {tensor.name: tensor for tensor in reader.tensors}
    up = found["blk.1.ffn_up.weight"]
    assert up.tensor_type == gguf.GGMLQuantizationType.F16
    assert np.array_equal(up.data, rounded["model.layers.1.mlp.up_proj.weight"].half().numpy())
