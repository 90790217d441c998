"""Exports that are run by their engine: llama.cpp itself."""

import re
import resource

import pytest
import torch
from transformers import AutoTokenizer

from rocket_core.calibration.datasets import held_out_text
from rocket_core.config import compression_config
from rocket_core.evaluation.divergence import token_divergence
from rocket_core.pipeline import compress
from rocket_core.pipeline.stages import engine_run
from rocket_core.speed import llama_cpp_runtime
from rocket_core.speed.messages import Likeliest
from rocket_core.speed.predictions import LIKELIEST
from tests.reference import gguf_models
from tests.reference.llama_cpp import Engine
from tests.sampling import sweep

pytest.importorskip("xllamacpp", reason="llama.cpp is needed: pip install xllamacpp")
KEPT = ["gemma2", "gpt_oss", "mixtral"]


def made(model, folder, **settings):
    """Compress a model for llama.cpp from its weights alone, and return the report."""
    return compress(str(model), folder, compression_config(preset="instant", engine="llama.cpp", bits=9, **settings))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    gguf_models.save("llama", folder)
    return folder


@pytest.fixture(scope="module")
def loaded(llama, tmp_path_factory):
    output = tmp_path_factory.mktemp("out")
    return output, made(llama, output).exports[0].loading


def test_llama_cpp_computes_what_the_weights_say(loaded):
    _, loading = loaded
    assert loading.anomaly is None
    assert 0 < loading.kl_divergence < 0.02
    assert (loading.prompt_tokens, loading.new_tokens, loading.splits_alike) == (32, 20, True)
    assert "xllamacpp" in loading.version


def test_the_text_is_what_the_engine_generates(loaded, llama):
    output, loading = loaded
    tokenizer, engine = AutoTokenizer.from_pretrained(llama), Engine(output / "gguf" / "model.gguf")
    prompt = tokenizer(held_out_text()[:400])["input_ids"][:32]
    tokens, _ = engine.greedy(prompt, 20)
    assert tokenizer.encode(loading.text)[:8] == tokenizer.encode(tokenizer.decode(tokens))[:8]


@pytest.mark.slow
@pytest.mark.parametrize("name", sweep(KEPT, soak=[name for name in gguf_models.MODELS if name not in KEPT]))
def test_every_family_is_compared_with_its_weights(name, tmp_path):
    # Small caps of logits, so that they matter.
    changes = {"final_logit_softcapping": 2.0} if name == "gemma2" else {}
    gguf_models.save(name, tmp_path / "model", **changes)
    loading = made(tmp_path / "model", tmp_path / "out").exports[0].loading
    assert loading.fault is None
    assert 0 <= loading.kl_divergence < 0.02


def test_another_weight_is_an_anomaly(llama, tmp_path, monkeypatch):
    read = engine_run._StoredWeights._weight

    def swapped(self, layer):
        weight = read(self, layer)
        return weight.flip(0) if layer.name.endswith("layers.1.self_attn.o_proj") else weight

    monkeypatch.setattr(engine_run._StoredWeights, "_weight", swapped)
    report = made(llama, tmp_path)
    assert "computes something else than the weights say" in report.exports[0].loading.anomaly
    assert report.exports[0].loading_text in (tmp_path / "report.html").read_text()


def test_a_damaged_file_is_an_anomaly(llama, tmp_path, monkeypatch):
    continued = engine_run._continued

    def damaged(subject, *arguments):
        copy = tmp_path / "damaged.gguf"
        copy.write_bytes(subject.path.read_bytes()[:1000])
        return continued(subject.model_copy(update={"path": copy}), *arguments)

    monkeypatch.setattr(engine_run, "_continued", damaged)
    loading = made(llama, tmp_path / "out").exports[0].loading
    assert loading.anomaly.startswith("llama.cpp did not run it: llama.cpp does not read")


@pytest.mark.parametrize(
    ("where", "name", "value", "message"),
    [
        (
            llama_cpp_runtime,
            "installed_version",
            None,
            "not loaded by its engine: llama.cpp is not installed: pip install xllamacpp",
        ),
        (
            engine_run,
            "free_machine_memory",
            1000,
            "not loaded by its engine: it has .* kB, and 1.00 kB of memory are free",
        ),
    ],
)
def test_what_cannot_be_tried_is_said(llama, tmp_path, monkeypatch, where, name, value, message):
    monkeypatch.setattr(where, name, lambda: value)
    (export,) = made(llama, tmp_path).exports
    assert export.loading.anomaly is None
    assert re.match(message, export.loading_text)
    assert export.loading_text in (tmp_path / "gguf" / "README.md").read_text()


def test_a_limit_of_the_process_is_respected(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _what: (2**28 + 1000, 2**40))
    assert engine_run._lack_of_memory(1000) is None
    assert engine_run._lack_of_memory(1001) == "it has 1.00 kB, and 1.00 kB of memory are free"


def places(logits):
    """Return the likeliest tokens of some logits, as engines tell them."""
    found = logits.double().log_softmax(-1).topk(min(LIKELIEST, logits.shape[-1]))
    return [Likeliest(tokens=t.tolist(), log_probabilities=p.tolist()) for t, p in zip(found[1], found[0], strict=True)]


@pytest.mark.parametrize("vocabulary", [2, 16])
def test_few_tokens_have_the_exact_divergence(vocabulary):
    own, other = torch.randn(2, 5, vocabulary, generator=torch.Generator().manual_seed(3))
    expected = token_divergence(own, other).kl_divergence / 5
    assert engine_run._divergence(own, places(other)) == pytest.approx(expected, abs=1e-7)


def test_many_tokens_have_at_most_their_divergence():
    own, other = torch.randn(2, 5, 1000, generator=torch.Generator().manual_seed(3))
    expected = token_divergence(own, other).kl_divergence / 5
    assert 0 < engine_run._divergence(own, places(other)) < expected
