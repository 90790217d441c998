"""What an error in a block's output leads to, compared with the whole model in float64."""

import pytest
import torch
from transformers import BertConfig, BertModel, Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from rocket_core.calibration import sensitivity
from rocket_core.calibration.samples import CalibrationInputs
from rocket_core.checkpoint import find_model
from rocket_core.pipeline.block_walk import begin_walk, loaded_block
from rocket_core.pipeline.preflight import prepare_run
from rocket_core.pipeline.stages.sequential.continuation import continuation
from tests.reference.tiny_models import VOCAB_SIZE, byte_tokenizer

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    # Soft caps on scores and logits.
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SIZES, head_dim=8, sliding_window=8, attn_logit_softcapping=2.0, final_logit_softcapping=3.0)
    ),
}
WINDOWS, LENGTH = 4, 16


@pytest.fixture
def measured(tmp_path, settings):
    """Return the model, the hidden states at the output of a block with noise, and what `continuation` measures."""

    def make(model, index):
        folder = tmp_path / "model"
        model.save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        run = prepare_run(find_model(str(folder)), settings())
        tokens = torch.randint(3, 259, (WINDOWS, LENGTH), generator=torch.Generator().manual_seed(0))
        inputs = CalibrationInputs.of_text(tokens)

        def batches():
            return inputs.batches(2, run.device, run.compute_dtype)

        states = begin_walk(run, batches(), run.architecture.list_of(0))
        for position in range(index + 1):
            with loaded_block(run, position) as block:
                for batch in range(len(states.hidden)):
                    states.step(block, position, batch)
        noise = torch.randn(2, LENGTH, 32, generator=torch.Generator().manual_seed(1))
        hidden = (states.hidden[1] + 0.1 * noise).requires_grad_()
        with continuation(run, index, states, batches) as error_of:
            if error_of is None:
                return None
            error = error_of(1, hidden)
            error.backward()
            with torch.no_grad():
                again = error_of(1, hidden)
        assert float(again) == pytest.approx(float(error.detach()), rel=1e-5)
        return float(error.detach()), tokens[2:], hidden

    return make


def built(name):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[name]().eval()


def outputs(model, index, tokens, hidden=None):
    """Return the output of the block after `index` (None if it is the last) and the logits, given that of `index`."""
    layers, seen = model.model.layers, []
    handles = []
    if hidden is not None:
        handles.append(layers[index].register_forward_hook(lambda _module, _args, _output: hidden))
    if index + 1 < len(layers):
        handles.append(layers[index + 1].register_forward_hook(lambda _module, _args, output: seen.append(output)))
    logits = model(input_ids=tokens, use_cache=False).logits
    for handle in handles:
        handle.remove()
    return (seen[0] if seen else None), logits


@pytest.mark.parametrize(("name", "index"), [("llama", 0), ("llama", 1), ("llama", 2), ("gemma2", 1)])
@pytest.mark.parametrize("logit_bytes", [64 * 2**20, 4 * VOCAB_SIZE * LENGTH])
def test_errors_and_gradients_are_those_of_the_whole_model(measured, monkeypatch, name, index, logit_bytes):
    monkeypatch.setattr(sensitivity, "_LOGIT_BYTES", logit_bytes)
    model = built(name)
    error, tokens, hidden = measured(model, index)
    model.double()
    exact = hidden.detach().double().requires_grad_()
    with torch.no_grad():
        wanted_states, wanted = outputs(model, index, tokens)
    found_states, found = outputs(model, index, tokens, exact)
    if index == 0:
        expected = (found_states - wanted_states).square().sum(-1).mean()
    else:
        p, q = wanted.log_softmax(-1), found.log_softmax(-1)
        expected = (p.exp() * (p - q)).sum(-1).mean()
    expected.backward()
    assert error == pytest.approx(float(expected.detach()), rel=1e-4)
    torch.testing.assert_close(hidden.grad.double(), exact.grad, rtol=1e-3, atol=1e-4 * float(exact.grad.abs().max()))


def test_nothing_follows_the_last_block_of_an_encoder(measured):
    sizes = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size")}
    assert measured(BertModel(BertConfig(**sizes, num_hidden_layers=2)), 1) is None


def test_without_an_error_there_is_none_further_on(measured, monkeypatch):
    monkeypatch.setattr(torch, "randn", lambda *shape, **_more: torch.zeros(shape))
    error, _, hidden = measured(built("llama"), 1)
    assert error == pytest.approx(0, abs=1e-6)
    assert float(hidden.grad.abs().max()) < 1e-5
