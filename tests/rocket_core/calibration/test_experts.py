import copy

import pytest
import torch

from rocket_core.calibration.experts import ExpertInputs, effective_rank, find_experts, shrink_to_block
from rocket_core.calibration.grams import InputGroup, collect_statistics, find_input_groups
from rocket_core.experts import unfuse, visiting
from rocket_core.linalg.whitening import GramStatistics
from tests.reference.tiny_mixtures import CHOSEN, EXPERT_SIZE, EXPERTS, MIXTURES
from tests.reference.tiny_models import HIDDEN_SIZE

# Experts that store their inputs in each of the ways that are known.
FAMILIES = ["mixtral", "gpt_oss", "llama4"]


def block_of(family, *, unused=None):
    """Return a block, its experts with their layers, and something that runs a batch through it."""
    model = MIXTURES[family]()
    unfuse(model)
    block = model.model.layers[0]
    name, experts = next(iter(find_experts(block, "").items()))
    states = torch.randn(3, 30, HIDDEN_SIZE, generator=torch.Generator().manual_seed(0))
    if unused is not None:
        states[..., 0] = 5
        router = block.get_submodule("mlp.gate")
        router.weight.data = torch.arange(1.0, EXPERTS + 1)[:, None] * torch.eye(HIDDEN_SIZE)[0]
        router.weight.data[unused] = 0
    layers = {
        f"{name}.{index}.{projection}": expert.get_submodule(projection)
        for index, expert in enumerate(experts)
        for projection in ("gate_proj", "up_proj", "down_proj")
    }
    mlp = block.get_submodule(name.rpartition(".")[0])

    def run(batch):
        with torch.no_grad():
            return mlp(states[batch][None])

    return experts, layers, name, states, run


def groups_of(layers, run, experts, *, from_output=False):
    shapes = {name: (layer.in_features, layer.out_features) for name, layer in layers.items()}
    with visiting(experts, "each"):
        found = find_input_groups(layers, shapes, lambda: run(0))
    return [InputGroup(layers=group.layers, from_output=from_output) for group in found]


def collected(experts, layers, name, run, groups):
    seen = ExpertInputs(experts={name: experts}, batches=3, dtype=torch.float64)
    with seen.watching():
        own = collect_statistics(layers, groups, run, batches=3, dtype=torch.float64)
    return copy.deepcopy(own), seen.shrunk(own, groups)


@pytest.mark.parametrize("family", FAMILIES)
def test_gate_and_up_of_an_expert_share_an_input(family):
    experts, layers, name, _, run = block_of(family)
    groups = {frozenset(group.layers) for group in groups_of(layers, run, experts)}
    assert groups == {
        frozenset(f"{name}.{index}.{projection}" for projection in members)
        for index in range(EXPERTS)
        for members in (("gate_proj", "up_proj"), ("down_proj",))
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_own_statistics_are_those_of_routed_tokens(family):
    experts, layers, name, states, run = block_of(family)
    own, _ = collected(experts, layers, name, run, groups_of(layers, run, experts))
    gate = f"{name}.{{}}.gate_proj"
    counted = sum(own[gate.format(index)].tokens for index in range(EXPERTS))
    assert counted == 90 * CHOSEN
    if family == "llama4":
        return  # Its tokens are scaled by the router.
    total = sum(own[gate.format(index)].gram for index in range(EXPERTS))
    flat = states.reshape(-1, HIDDEN_SIZE).double()
    torch.testing.assert_close(total, CHOSEN * flat.T @ flat, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("from_output", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_shrunk_statistics_add_tokens_of_the_block(family, from_output):
    experts, layers, name, states, run = block_of(family)
    groups = groups_of(layers, run, experts, from_output=from_output)
    own, shrunk = collected(experts, layers, name, run, groups)
    assert shrunk.keys() == layers.keys()
    flat = states.reshape(-1, HIDDEN_SIZE)
    if family == "llama4":
        entered = []
        handle = experts.register_forward_pre_hook(lambda module, args: entered.append(module.entering(args[0])))
        for batch in range(3):
            run(batch)
        handle.remove()
        flat = torch.cat(entered)
    for index, expert in enumerate(experts):
        for projection in ("gate_proj", "up_proj", "down_proj"):
            layer = f"{name}.{index}.{projection}"
            rows = (expert.inner(flat) if projection == "down_proj" else flat).detach().double()
            covariance = rows.T @ rows / len(rows)
            rank = round(float(covariance.trace() ** 2 / (covariance**2).sum()))
            found = shrunk[layer]
            assert (found.routed, found.tokens) == (own[layer].tokens, own[layer].tokens + rank)
            torch.testing.assert_close(
                found.input_energy, own[layer].input_energy + rank * covariance.diagonal(), rtol=1e-4, atol=1e-4
            )
            if from_output:
                weight = layers[layer].weight.detach().double()
                expected = own[layer].output_gram + rank * weight @ covariance @ weight.T
                torch.testing.assert_close(found.output_gram, expected, rtol=1e-4, atol=1e-4)
            else:
                torch.testing.assert_close(found.gram, own[layer].gram + rank * covariance, rtol=1e-4, atol=1e-4)


def test_gram_matrices_of_experts_are_held_once():
    experts, layers, name, _, run = block_of("mixtral")
    seen = ExpertInputs(experts={name: experts}, batches=3, dtype=torch.float64)
    groups = groups_of(layers, run, experts)
    with seen.watching():
        own = collect_statistics(layers, groups, run, batches=3, dtype=torch.float64)
    before = {layer: found.gram.data_ptr() for layer, found in own.items()}
    shrunk = seen.shrunk(own, groups)
    assert {layer: found.gram.data_ptr() for layer, found in shrunk.items()} == before
    assert len(set(before.values())) == 2 * EXPERTS


def test_an_expert_without_tokens_takes_those_of_its_block():
    experts, layers, name, states, run = block_of("mixtral", unused=1)
    groups = groups_of(layers, run, experts)
    own, shrunk = collected(experts, layers, name, run, groups)
    assert f"{name}.1.gate_proj" not in own
    found = shrunk[f"{name}.1.gate_proj"]
    flat = states.reshape(-1, HIDDEN_SIZE).double()
    assert found.routed == 0
    torch.testing.assert_close(found.gram / found.tokens, flat.T @ flat / 90, rtol=1e-5, atol=1e-5)
    assert shrunk[f"{name}.1.down_proj"].gram.shape == (EXPERT_SIZE, EXPERT_SIZE)
    assert shrunk[f"{name}.1.down_proj"].tokens >= 1


def test_other_layers_of_the_block_are_left_alone():
    experts, _, name, _, run = block_of("mixtral")
    plain = GramStatistics(tokens=5, gram=torch.eye(2).double(), output_gram=None, input_energy=torch.ones(2).double())
    seen = ExpertInputs(experts={name: experts}, batches=1, dtype=torch.float64)
    with seen.watching():
        run(0)
    groups = [InputGroup(layers=("self_attn.o_proj",), from_output=False)]
    assert seen.shrunk({"self_attn.o_proj": plain}, groups) == {"self_attn.o_proj": plain}
    assert plain.routed is None


def test_effective_rank_counts_equal_directions():
    assert effective_rank(torch.diag(torch.tensor([3.0, 3.0, 3.0, 0.0]))) == pytest.approx(3)
    assert effective_rank(torch.diag(torch.tensor([1e6, 1.0, 1.0]))) == pytest.approx(1, abs=1e-4)
    assert effective_rank(torch.zeros(3, 3)) == 0
    nothing = shrink_to_block(None, torch.zeros(3, 3).double(), None)
    assert (nothing.tokens, nothing.routed) == (1, 0)


def sampled(covariance, tokens, generator):
    """Return the sum of outer products of Gaussian vectors with a given covariance."""
    factor = torch.linalg.cholesky(covariance)
    rows = torch.randn(tokens, len(covariance), generator=generator, dtype=torch.float64) @ factor.T
    return rows.T @ rows


@pytest.mark.parametrize("tokens", [1, 4, 16, 64, 256, 2048])
def test_shrinking_beats_either_estimate_where_it_matters(tokens):
    # Experts whose covariances differ from their mean about as much as from zero, with the falling spectrum of states.
    generator = torch.Generator().manual_seed(tokens)
    size, spectrum = 24, torch.arange(1, 25, dtype=torch.float64) ** -1.0
    bases = [torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0] for _ in range(4)]
    truths = [basis @ torch.diag(spectrum) @ basis.T for basis in bases]
    block = sum(truths) / 4
    errors = {"own": 0.0, "block": 0.0, "shrunk": 0.0}
    for truth in truths:
        for _ in range(20):
            gram = sampled(truth, tokens, generator)
            own = GramStatistics(tokens=tokens, gram=gram, output_gram=None, input_energy=gram.diagonal())
            shrunk = shrink_to_block(own, block, None)
            for name, estimate in (("own", gram / tokens), ("block", block), ("shrunk", shrunk.gram / shrunk.tokens)):
                errors[name] += float((estimate - truth).square().sum())
    assert errors["shrunk"] < 1.05 * min(errors["own"], errors["block"])
    if tokens in (4, 16):
        assert errors["shrunk"] < 0.9 * min(errors["own"], errors["block"])
