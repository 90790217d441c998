import copy
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import silu

from rocket_core.experts import unfuse
from rocket_core.models.block_calls import record_block_inputs
from rocket_core.pipeline.stages.sequential import expert_sums
from rocket_core.pipeline.stages.sequential.block_side import BlockSide
from rocket_core.pipeline.stages.sequential.expert_sums import ExpertSums, expert_layers
from tests.reference.tiny_mixtures import EXPERTS, MIXTURES, inputs

PREFIX = "model.layers.1."


@pytest.fixture(scope="module")
def sides():
    """Return a block of Mixtral with two batches, and a copy with other weights that reads other states."""
    model = MIXTURES["mixtral"]()
    unfuse(model)
    states = record_block_inputs(model, model.model.layers, inputs().split(2))
    block, generator = model.model.layers[1], torch.Generator().manual_seed(0)
    changed = copy.deepcopy(block)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    other = [hidden + 0.3 * torch.randn(hidden.shape, generator=generator) for hidden in states.hidden]
    names = [f"{PREFIX}mlp.experts.{expert}.{last}" for expert in range(EXPERTS) for last in ("gate_proj", "down_proj")]
    layers = [{name: one.get_submodule(name.removeprefix(PREFIX)) for name in names} for one in (block, changed)]
    return (
        BlockSide(block, 1, states, layers[0]),
        BlockSide(changed, 1, replace(states, hidden=other), layers[1]),
        expert_layers(names, block, PREFIX),
    )


def of_all(sides, *, everywhere=False):
    dense, compressed, layers = sides
    ordered = sorted(layers.values(), key=lambda layer: layer.is_last)
    sums = ExpertSums(ordered, dense, compressed, dtype=torch.float64, everywhere=everywhere, on_batch=lambda: None)
    return {layer.name: sums.of(layer) for layer in ordered}


@torch.no_grad()
def read(sides):
    """Return what enters the experts in both models, token by token, and the experts of each in the dense one."""
    dense, compressed, _ = sides
    calls = [[side.arguments("mlp.experts", batch) for batch in range(2)] for side in (dense, compressed)]
    states, others = (torch.cat([call[0].flatten(0, -2) for call in side]).double() for side in calls)
    return states, others, torch.cat([call[1] for call in calls[0]])


@torch.no_grad()
def inner(expert, rows):
    weights = (expert.gate_proj.weight.double(), expert.up_proj.weight.double())
    return silu(rows @ weights[0].T) * (rows @ weights[1].T)


def explicit(sides, expert, *, is_last, everywhere):
    """Return gram, cross and tokens of an expert, by writing out all rows."""
    dense, compressed, _ = sides
    states, others, chosen = read(sides)
    if is_last:
        states, others = (
            inner(side.block.mlp.experts[expert], rows) for side, rows in ((dense, states), (compressed, others))
        )
    rows = [token for token in range(len(states)) if everywhere or expert in chosen[token].tolist()]
    gram, cross = (others[rows].T @ one[rows] for one in (others, states))
    if everywhere:
        return gram, cross, len(states)
    covariance = states.T @ states / len(states)
    rank = round(float(covariance.trace() ** 2 / (covariance**2).sum()))
    share = rank / len(states)
    return gram + share * others.T @ others, cross + share * others.T @ states, len(rows) + rank


@pytest.mark.parametrize("everywhere", [False, True])
def test_sums_are_those_of_the_tokens_that_the_dense_model_sends(sides, everywhere):
    found = of_all(sides, everywhere=everywhere)
    assert len(found) == 2 * EXPERTS
    for layer in sides[2].values():
        gram, cross, tokens = explicit(sides, layer.expert, is_last=layer.is_last, everywhere=everywhere)
        sums = found[layer.name]
        assert sums.tokens == tokens
        torch.testing.assert_close(sums.gram, gram, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(sums.cross, cross, rtol=1e-3, atol=1e-4)


def test_sums_do_not_depend_on_how_many_fit_into_memory(sides, monkeypatch):
    before = of_all(sides)
    monkeypatch.setattr(expert_sums, "_MOST_BYTES", 1)
    after = of_all(sides)
    for name, sums in before.items():
        assert torch.equal(sums.gram, after[name].gram)
        assert torch.equal(sums.cross, after[name].cross)


def test_an_expert_without_tokens_reads_the_average(sides, monkeypatch):
    dense = sides[0]
    arguments = dense.arguments

    def to_others(module, batch):
        states, chosen, weights = arguments(module, batch)
        return states, chosen.masked_fill(chosen == 2, 1), weights

    monkeypatch.setattr(dense, "arguments", to_others)
    states, others, _ = read(sides)
    sums = of_all(sides)[f"{PREFIX}mlp.experts.2.gate_proj"]
    average = sums.tokens / len(states) * others.T @ others
    torch.testing.assert_close(sums.gram, average, rtol=1e-3, atol=1e-4)
