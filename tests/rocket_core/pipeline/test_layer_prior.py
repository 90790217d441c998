"""What the names of layers say about them."""

from types import SimpleNamespace

import pytest
import torch

from rocket_core.models.architecture import build_architecture
from rocket_core.models.token_tables import TokenTable
from rocket_core.pipeline.layer_prior import layer_share, named_groups, prior_weights, table_share
from tests.reference import tiny_mixtures
from tests.reference.tiny_models import ALL_FAMILIES


def run_of(config):
    architecture = build_architecture(config, torch.float32)
    return SimpleNamespace(architecture=architecture, layers=architecture.layers)


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2", "bert", "t5"])
def test_the_shares_of_all_blocks_are_about_one(family):
    run = run_of(ALL_FAMILIES[family]().config)
    shares = {name: layer_share(run, name) for names in run.layers for name in names}
    assert 0.7 <= sum(shares.values()) <= 1.3
    assert all(share > 0 for share in shares.values())


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_divide_the_share_of_a_layer(family):
    run = run_of(tiny_mixtures.MIXTURES[family]().config)
    shares = {name: layer_share(run, name) for names in run.layers for name in names}
    assert 0.7 <= sum(shares.values()) <= 1.3


def test_an_error_as_large_as_the_weight_has_its_share():
    weight = torch.randn(40, 12, generator=torch.Generator().manual_seed(0)) * torch.arange(12)
    weights = prior_weights(weight, 0.3)
    losses = weight.double().square().sum(dim=0) * weights.square() / 2
    assert float(losses.sum()) == pytest.approx(0.3 * 11 / 12)
    assert torch.allclose(losses[1:], losses[1])
    assert bool(prior_weights(torch.zeros(4, 3), 0.3).isfinite().all())


def test_layers_that_engines_fuse_are_one_group():
    run = run_of(ALL_FAMILIES["llama"]().config)
    names = run.layers[0]
    groups = named_groups(run, names)
    members = {
        frozenset(name.rpartition(".")[2] for name in names if groups[name] == group) for group in groups.values()
    }
    assert members == {
        frozenset({"q_proj", "k_proj", "v_proj"}),
        frozenset({"o_proj"}),
        frozenset({"gate_proj", "up_proj"}),
        frozenset({"down_proj"}),
    }


def test_a_table_that_is_used_twice_has_the_share_of_both():
    both, one = TokenTable(embedding="embed", head="head"), TokenTable(embedding="embed", head=None)
    assert table_share(both) == 2 * table_share(one)
