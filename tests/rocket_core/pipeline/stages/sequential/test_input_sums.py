import copy
from dataclasses import replace

import pytest
import torch

from rocket_core.models.block_calls import record_block_inputs
from rocket_core.pipeline.stages.sequential.block_side import BlockSide
from rocket_core.pipeline.stages.sequential.cross_sums import CrossSums
from rocket_core.pipeline.stages.sequential.input_sums import InputSums
from tests.reference.tiny_models import build_llama, tiny_inputs

LAYERS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
DEVIATING = {"self_attn.o_proj", "mlp.down_proj"}


@pytest.fixture
def sides():
    """Return a block of a Llama with two batches, and a copy with other weights that reads other states."""
    model = build_llama()
    states = record_block_inputs(model, model.model.layers, tiny_inputs(model)["input_ids"].split(2))
    block, generator = model.model.layers[0], torch.Generator().manual_seed(0)
    changed = copy.deepcopy(block)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    other = [hidden + 0.3 * torch.randn(hidden.shape, generator=generator) for hidden in states.hidden]
    return tuple(
        BlockSide(one, 0, activations, {name: one.get_submodule(name) for name in LAYERS})
        for one, activations in ((block, states), (changed, replace(states, hidden=other)))
    )


def summed(sides, *, alone=True, compensates=True):
    """Return the sums of all layers in the order of their calls; the last pass takes the dense stream onwards."""
    sums = InputSums(*sides, dtype=torch.float64, on_batch=lambda: None, compensates=compensates)
    return {name: sums.add_to(CrossSums(), name, alone=alone, for_good=name == LAYERS[-1]) for name in LAYERS}


@torch.no_grad()
def rows_and_streams(side):
    """Return what each layer reads, and the stream before each, of one uninterrupted pass over all batches."""
    read, handles = {}, []
    watched = {**side.layers, "norm": side.block.post_attention_layernorm}
    for name, module in watched.items():
        handles.append(
            module.register_forward_pre_hook(
                lambda _, args, name=name: read.setdefault(name, []).append(args[0].flatten(0, -2).double())
            )
        )
    for batch in range(side.batches):
        side.run(batch)
    for handle in handles:
        handle.remove()
    rows = {name: torch.cat(found) for name, found in read.items()}
    entering = torch.cat([hidden.flatten(0, -2).double() for hidden in side.states.hidden])
    return rows, {"self_attn.o_proj": entering, "mlp.down_proj": rows["norm"]}


def test_sums_have_the_products_of_all_rows(sides):
    (dense_rows, dense_streams), (rows, streams) = (rows_and_streams(side) for side in sides)
    entered = list(sides[0].states.hidden)
    found = summed(sides)
    for name, sums in found.items():
        assert sums.tokens == len(rows[name])
        torch.testing.assert_close(sums.gram, rows[name].T @ rows[name], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(sums.cross, rows[name].T @ dense_rows[name], rtol=1e-4, atol=1e-4)
        if name in DEVIATING:
            deviation = rows[name].T @ (dense_streams[name] - streams[name])
            torch.testing.assert_close(sum(half.deviation for half in sums.halves), deviation, rtol=1e-4, atol=1e-4)
        else:
            assert all(half.deviation is None for half in sums.halves)
    assert all(not torch.equal(one, other) for one, other in zip(entered, sides[0].states.hidden, strict=True))


def test_equal_streams_do_not_deviate(sides):
    dense = sides[0]
    same = BlockSide(copy.deepcopy(dense.block), 0, replace(dense.states, hidden=list(dense.states.hidden)), {})
    same.layers = {name: same.block.get_submodule(name) for name in LAYERS}
    found = summed((dense, same))
    for name in DEVIATING:
        assert not any(half.deviation.any() for half in found[name].halves)


@pytest.mark.parametrize("changes", [{"alone": False}, {"compensates": False}])
def test_nothing_deviates_where_layers_may_not_compensate(sides, changes):
    assert all(half.deviation is None for sums in summed(sides, **changes).values() for half in sums.halves)
