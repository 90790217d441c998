import pytest
import torch
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from rocket_core.layers import is_stock_linear
from rocket_core.models.block_lists import find_lists
from rocket_core.models.residual_stream import ResidualStream, find_residual_stream
from tests.reference.tiny_models import FAMILIES, HIDDEN_SIZE, tiny_inputs

SIZES = {
    "vocab_size": 320,
    "hidden_size": HIDDEN_SIZE,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GATED = {**SIZES, "intermediate_size": 80, "num_key_value_heads": 2, "initializer_range": 0.2}
LLAMA_LAYERS = {"self_attn.o_proj", "mlp.down_proj"}

EXPECTED = {
    "llama": LLAMA_LAYERS,
    "qwen3": LLAMA_LAYERS,
    "mistral": LLAMA_LAYERS,
    "gemma": LLAMA_LAYERS,
    "phi3": LLAMA_LAYERS,
    "gpt2": {"attn.c_proj", "mlp.c_proj"},
    "opt": {"self_attn.out_proj", "fc2"},
    # Attention and MLP in parallel.
    "gpt_neox": {"attention.dense", "mlp.dense_4h_to_h"},
}
OTHERS = {
    "normalised sums": lambda: OPTForCausalLM(
        OPTConfig(**SIZES, ffn_dim=80, word_embed_proj_dim=HIDDEN_SIZE, do_layer_norm_before=False)
    ),
    "norms of outputs": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**GATED, head_dim=8)),
    "norms of outputs alone": lambda: Olmo2ForCausalLM(Olmo2Config(**GATED)),
    "scaled": lambda: GraniteForCausalLM(GraniteConfig(**GATED, residual_multiplier=0.22)),
    "scaled by 1": lambda: GraniteForCausalLM(GraniteConfig(**GATED, residual_multiplier=1.0)),
    "experts": lambda: MixtralForCausalLM(MixtralConfig(**GATED, num_local_experts=4)),
}
EXPECTED_OF_OTHERS = {"scaled by 1": LLAMA_LAYERS, "experts": {"self_attn.o_proj"}}


class Entered(nn.Module):
    """The last block of a model, with what enters it."""

    def __init__(self, model):
        super().__init__()
        self.model = model.eval()
        [found] = find_lists(model)
        self.block = model.get_submodule(found.name)[-1]
        self.inputs = tiny_inputs(model)
        entered = []
        handle = self.block.register_forward_pre_hook(
            lambda _module, args, kwargs: entered.append((args[0] if args else kwargs["hidden_states"]).clone()),
            with_kwargs=True,
        )
        self.run()
        handle.remove()
        [self.hidden] = entered
        self.layers = {name: part for name, part in self.block.named_modules() if is_stock_linear(part)}

    def run(self):
        with torch.no_grad():
            return self.model(**self.inputs, use_cache=False)

    def stream(self):
        return find_residual_stream(self.block, self.layers, self.hidden, self.run)


class Block(nn.Module):
    """A block of two layers; `combine` makes its output of its input and the outputs of both."""

    def __init__(self, combine):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.combine = combine

    def forward(self, hidden):
        return self.combine(self, hidden)


def stream_of(combine, dtype=torch.float32):
    block = Block(combine).to(dtype)
    hidden = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    layers = {"first": block.first, "second": block.second}
    with torch.no_grad():
        return find_residual_stream(block, layers, hidden, lambda: block(hidden))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", EXPECTED)
def test_layers_that_end_in_the_stream_are_found(family, dtype):
    assert Entered(FAMILIES[family]().to(dtype)).stream().layers == EXPECTED[family]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", OTHERS)
def test_no_layer_is_found_whose_output_is_changed_first(kind, dtype):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = OTHERS[kind]().to(dtype)
    assert Entered(model).stream().layers == EXPECTED_OF_OTHERS.get(kind, set())


def test_the_stream_is_what_the_next_norm_reads():
    entered = Entered(FAMILIES["llama"]())
    stream, read = entered.stream(), []
    handle = entered.block.post_attention_layernorm.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    states = {}
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        with stream.before(entered.layers[name], entered.block, entered.hidden) as state:
            entered.run()
        states[name] = state.rows
    handle.remove()
    torch.testing.assert_close(states["self_attn.o_proj"], entered.hidden.reshape(-1, HIDDEN_SIZE), rtol=0, atol=0)
    torch.testing.assert_close(states["mlp.down_proj"], read[0].reshape(-1, HIDDEN_SIZE), rtol=1e-6, atol=1e-6)


def in_sequence(block, hidden):
    hidden = hidden + block.first(hidden)
    return hidden + block.second(hidden)


def in_place(block, hidden):
    update = block.first(hidden)
    update += hidden
    other = block.second(update)
    other += update
    return (other, None)


def test_a_few_tokens_of_a_batch_suffice(monkeypatch):
    monkeypatch.setattr("rocket_core.models.residual_stream._TOKENS", 3)
    assert stream_of(in_sequence).layers == {"first", "second"}


@pytest.mark.parametrize("combine", [in_sequence, in_place])
def test_parts_are_in_the_order_of_their_calls(combine):
    expected = ResidualStream(parts=("first", "second"), layers=frozenset({"first", "second"}))
    assert stream_of(combine) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "combine",
    [
        lambda block, hidden: hidden + 0.9 * block.first(hidden) + block.second(hidden),
        lambda block, hidden: hidden - block.first(hidden) + block.second(hidden),
        lambda block, hidden: 0.9 * hidden + block.first(hidden) + block.second(hidden),
        lambda block, hidden: hidden + block.first(hidden) + block.second(hidden) + 0.1,
        lambda block, hidden: hidden + block.first(hidden) * block.second(hidden),
        lambda block, hidden: hidden + block.first(hidden) + block.second(block.second(hidden)),
        lambda block, hidden: hidden[..., :4] + block.first(hidden)[..., :4],
    ],
    ids=["scaled", "subtracted", "input scaled", "constant", "product", "called twice", "another size"],
)
def test_nothing_is_found_if_the_sum_is_another(combine, dtype):
    assert stream_of(combine, dtype) == ResidualStream()


def test_a_layer_before_another_is_no_part_of_the_stream():
    found = stream_of(lambda block, hidden: hidden + block.second(block.first(hidden)))
    assert found == ResidualStream(parts=("second",), layers=frozenset({"second"}))
