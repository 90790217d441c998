import copy
import re

import pytest
import torch
from torch import nn
from transformers import JetMoeConfig, JetMoeForCausalLM, LongcatFlashConfig

from rocket_core.experts import (
    UnfusedExperts,
    find_fused,
    following_router,
    fuse,
    has_unfused,
    unfuse,
    unknown_experts,
    visiting,
)
from rocket_core.models.architecture import build_architecture
from tests.reference.tiny_mixtures import CHOSEN, EXPERT_SIZE, EXPERTS, MIXTURES, inputs
from tests.reference.tiny_models import HIDDEN_SIZE, VOCAB_SIZE

BIASED = {"gpt_oss"}
# Blocks with experts.
SPARSE_BLOCKS = dict.fromkeys(MIXTURES, (0, 1)) | dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe"), (1,))
# Parameters of a block with experts that are neither experts nor plain linear layers: norms, routers and biases.
_NORMS, _ROUTER = 2 * HIDDEN_SIZE, EXPERTS * HIDDEN_SIZE
OTHERS = {
    "mixtral": _NORMS + _ROUTER,
    "qwen2_moe": _NORMS + _ROUTER + 64,
    "qwen3_moe": _NORMS + _ROUTER + 2 * 16,
    "olmoe": _NORMS + _ROUTER + 32 + 16,
    "deepseek_v2": _NORMS + _ROUTER + 16 + 16,
    "deepseek_v3": _NORMS + _ROUTER + 16 + 16,
    "gpt_oss": _NORMS + _ROUTER + EXPERTS + 4 + 96 + EXPERTS * (2 * EXPERT_SIZE + HIDDEN_SIZE),
    "glm4_moe": _NORMS + _ROUTER,
    "granitemoe": _NORMS + _ROUTER,
    "phimoe": 2 * _NORMS + _ROUTER,
    "dbrx": _NORMS + _ROUTER,
    "llama4": _NORMS + _ROUTER,
}


@torch.no_grad()
def logits(model):
    return model(inputs()).logits


def experts_of(model):
    return [module for module in model.modules() if isinstance(module, UnfusedExperts)]


@pytest.mark.parametrize("family", MIXTURES)
class TestEveryFamily:
    def test_unfused_experts_compute_what_the_original_does(self, family):
        model = MIXTURES[family]()
        before = logits(model)
        unfuse(model)
        assert len(experts_of(model)) == len(SPARSE_BLOCKS[family])
        torch.testing.assert_close(logits(model), before, rtol=1e-5, atol=1e-5)

    def test_every_matrix_of_an_expert_is_a_layer(self, family):
        model = MIXTURES[family]()
        architecture = build_architecture(model.config, torch.float32)
        block = architecture.model.get_submodule(architecture.block_name(1))
        layers = architecture.layers[1]
        of_experts = [name for name in layers if re.search(r"\.experts\.\d\.(gate|up|down)_proj$", name)]
        assert len(of_experts) == 3 * EXPERTS
        shapes = {(HIDDEN_SIZE, EXPERT_SIZE), (EXPERT_SIZE, HIDDEN_SIZE)}
        assert {architecture.shape(name) for name in of_experts} == shapes
        selected = sum(d_in * d_out for d_in, d_out in map(architecture.shape, layers))
        assert sum(parameter.numel() for parameter in block.parameters()) - selected == OTHERS[family]
        assert sum(parameter.numel() for parameter in model.parameters()) == architecture.model.num_parameters()

    def test_fusing_gives_back_modules_names_and_bits(self, family):
        model = MIXTURES[family]()
        kinds = [type(module) for module in model.modules()]
        state = copy.deepcopy(model.state_dict())
        unfuse(model)
        fuse(model)
        assert [type(module) for module in model.modules()] == kinds
        assert not has_unfused(model)
        assert list(model.state_dict()) == list(state)
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())

    def test_experts_may_read_more_tokens_without_effect(self, family):
        model = MIXTURES[family]()
        unfuse(model)
        expected, read = logits(model), {}
        for module in experts_of(model):
            for index, expert in enumerate(module):
                expert.register_forward_pre_hook(
                    lambda _module, args, key=(id(module), index): read.setdefault(key, []).append(len(args[0]))
                )
        with visiting(model, "all"):
            torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)
        assert len(read) == EXPERTS * len(SPARSE_BLOCKS[family])
        # Each token enters the experts of Llama 4 once for each expert chosen.
        tokens = inputs().numel() * (CHOSEN if family == "llama4" else 1)
        assert all(counts == [tokens] for counts in read.values())
        assert {module.visits for module in experts_of(model)} == {"routed"}

    def test_gradients_are_those_of_the_original(self, family):
        model = MIXTURES[family]()
        model.requires_grad_(requires_grad=False)
        gradients = []
        for _ in range(2):
            leaf = model.get_input_embeddings()(inputs()).detach().requires_grad_()
            model(inputs_embeds=leaf).logits.square().sum().backward()
            gradients.append(leaf.grad)
            unfuse(model)
        torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "llama4"])
def test_an_expert_without_tokens_reads_one_if_asked_to(family):
    model = MIXTURES[family]()
    unfuse(model)
    module = experts_of(model)[0]
    layout = module.layout
    states = torch.randn(6, HIDDEN_SIZE)
    chosen, weights = torch.zeros(6, 1, dtype=torch.long), torch.ones(6, 1)
    routed = torch.cat([states, torch.zeros((EXPERTS - 1) * 6, HIDDEN_SIZE)])
    arguments = (states, chosen, weights) if layout.kind.routed else (routed,)
    read = dict.fromkeys(range(EXPERTS), 0)
    for index, expert in enumerate(module):
        expert.register_forward_pre_hook(lambda _module, args, index=index: read.update({index: len(args[0])}))
    with torch.no_grad():
        expected = module(*arguments)
        assert read == {0: 6, 1: 0, 2: 0, 3: 0}
        with visiting(model, "each"):
            assert torch.equal(module(*arguments), expected)
    assert read == {0: 6, 1: 1, 2: 1, 3: 1}
    torch.testing.assert_close(expected[:6], module[0](states))


@torch.no_grad()
def test_experts_that_are_not_told_read_the_tokens_of_the_leader():
    model = MIXTURES["llama4"]()
    unfuse(model)
    leader, read = model.model.layers[0].feed_forward, []
    follower = copy.deepcopy(leader)
    hidden = torch.randn(1, 50, HIDDEN_SIZE)
    others = hidden + torch.randn_like(hidden)
    for mixture in (leader, follower):
        mixture.experts.register_forward_pre_hook(lambda _module, args: read.append(args[0]))
    with following_router(leader, follower, "experts"):
        leader(hidden)
        follower(others)
    scores, own = leader.router(hidden[0])[0], follower.router(others[0])[0]
    assert not torch.equal(scores > 0, own > 0)
    rows, other_rows = leader.experts.entering(read[0]), follower.experts.entering(read[1], like=read[0])
    token, expert = (scores.T > 0).nonzero()[:, 1], (scores.T > 0).nonzero()[:, 0]
    assert torch.equal(rows, hidden[0, token] * scores[token, expert, None])
    assert torch.equal(other_rows, others[0, token] * scores[token, expert, None])
    # Afterwards each router decides again.
    follower(others)
    assert torch.equal(read[2], (own.T[:, :, None] * others).flatten(0, 1))


def test_experts_without_a_known_router_stay_as_they_are():
    model = MIXTURES["llama4"]()
    assert len(find_fused(model)) == 2
    model.model.layers[0].feed_forward.router = nn.Linear(HIDDEN_SIZE, EXPERTS + 1)
    assert list(find_fused(model)) == ["model.layers.1.feed_forward.experts"]


def test_copies_are_independent_and_can_be_fused():
    model = MIXTURES["gpt_oss"]()
    before = logits(model)
    unfuse(model)
    twin = copy.deepcopy(model)
    for parameter in experts_of(model)[0].parameters():
        nn.init.zeros_(parameter)
    fuse(twin)
    assert torch.equal(logits(twin), before)
    assert not torch.allclose(logits(model), before)


def test_experts_in_an_unknown_layout_stay_as_they_are():
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 24}
    heads = {"num_key_value_heads": 2, "kv_channels": 16, "num_local_experts": EXPERTS, "num_experts_per_tok": 2}
    config = JetMoeConfig(**sizes, **heads)
    model = JetMoeForCausalLM(config)
    assert not find_fused(model)
    state = list(model.state_dict())
    unfuse(model)
    assert list(model.state_dict()) == state
    found = unknown_experts(model.model.layers[0])
    assert set(found) >= {"mlp.input_linear.weight", "mlp.output_linear.weight"}
    assert found["mlp.output_linear.weight"] == (EXPERTS, 32, 24)
    [layers] = build_architecture(config, torch.float32).layers
    assert layers == ("model.layers.0.self_attention.kv_proj",)


def test_of_blocks_counted_twice_experts_and_routers_stay_dense():
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_layers": 2, "ffn_hidden_size": 48, "moe_topk": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "head_dim": 8}
    parts = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "expert_ffn_hidden_size": EXPERT_SIZE}
    config = LongcatFlashConfig(**sizes, **heads, **parts, n_routed_experts=EXPERTS, zero_expert_num=2)
    architecture = build_architecture(config, torch.float32)
    assert [len(block) for block in architecture.layers] == [16, 16]
    names = {name.split(".", 3)[3].split(".")[0] for block in architecture.layers for name in block}
    assert names == {"self_attn", "mlps"}
    block = architecture.model.get_submodule(architecture.block_name(0))
    assert set(unknown_experts(block)) == {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}


@pytest.mark.parametrize("change", ["another parameter", "a buffer", "another shape", "another name"])
def test_a_module_that_stores_more_is_not_recognised(change):
    model = MIXTURES["mixtral"]()
    for block in model.model.layers:
        experts = block.mlp.experts
        if change == "another parameter":
            experts.scale = nn.Parameter(torch.ones(EXPERTS))
        elif change == "a buffer":
            experts.register_buffer("scale", torch.ones(EXPERTS))
        elif change == "another shape":
            experts.down_proj = nn.Parameter(torch.ones(EXPERTS, HIDDEN_SIZE, EXPERT_SIZE + 1))
        else:
            experts.out_proj = experts.down_proj
            del experts.down_proj
    assert not find_fused(model)
    assert unknown_experts(model.model.layers[0]).keys() >= {"mlp.experts.gate_up_proj"}


def test_ungated_experts_are_unfused_as_well():
    class Ungated(nn.Module):
        has_gate, has_bias, is_transposed, is_concatenated, num_experts = False, False, False, True, 3

        def __init__(self):
            super().__init__()
            self.up_proj = nn.Parameter(torch.randn(3, 5, 4))
            self.down_proj = nn.Parameter(torch.randn(3, 4, 5))
            self.act_fn = nn.ReLU()

        def _apply_gate(self, _states):
            raise AssertionError("there is no gate")

    model = MIXTURES["mixtral"]()
    stock = Ungated()
    model.model.layers[0].mlp.experts = copy.deepcopy(stock)
    unfuse(model)
    states, indices, weights = torch.randn(7, 4), torch.arange(14).reshape(7, 2) % 3, torch.rand(7, 2)
    expected = torch.zeros(7, 4)
    for token in range(7):
        for slot in range(2):
            expert = indices[token, slot]
            output = stock.down_proj[expert] @ torch.relu(stock.up_proj[expert] @ states[token])
            expected[token] += weights[token, slot] * output
    torch.testing.assert_close(model.model.layers[0].mlp.experts(states, indices, weights), expected)
