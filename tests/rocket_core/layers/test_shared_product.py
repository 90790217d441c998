"""An owner and two followers, called with one input."""

import copy
import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from rocket_core.layers import FactorizedLinear, coefficient_linear
from rocket_core.layers.packing import unpack_bits
from tests.reference.stored_layers import D_IN, D_OUT, RANK, make_group, make_layer


@pytest.fixture
def group():
    """Return the layers, without training."""
    made, _ = make_group()
    for layer in made:
        layer.requires_grad_(requires_grad=False)
    return made


@pytest.fixture
def products(monkeypatch):
    """Count products with the dictionary: those whose result has as many features as there are atoms."""
    counted = []

    class Counting:
        @staticmethod
        def linear(*args):
            result = torch.nn.functional.linear(*args)
            if result.shape[-1] == RANK:
                counted.append(result)
            return result

    monkeypatch.setattr(coefficient_linear, "functional", Counting)
    return counted


def new_input(*, requires_grad=False, seed=0):
    x = torch.randn(4, D_IN, generator=torch.Generator().manual_seed(seed))
    return x.requires_grad_(requires_grad)


def is_left(layers_of_group):
    return layers_of_group[0]._shared._entry is not None


def check(layer, x, result):
    torch.testing.assert_close(result, x @ layer.dense_weight().T + layer.bias, rtol=1e-4, atol=1e-5)


class TestOneProduct:
    @pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0, 1)])
    def test_it_serves_all_layers_in_any_order(self, group, products, order):
        x = new_input()
        for index in order:
            check(group[index], x, group[index](x))
        assert len(products) == 1
        assert not is_left(group)

    def test_it_is_bitwise_equal_to_separate_products(self, group):
        x = new_input()
        together = [layer(x) for layer in group]
        assert all(torch.equal(layer(x.clone()), result) for layer, result in zip(group, together, strict=True))

    def test_it_is_recomputed_in_each_round(self, group, products):
        x = new_input()
        for _ in range(3):
            for layer in group:
                layer(x)
        assert len(products) == 3

    def test_it_is_not_cached_for_a_layer_that_shares_nothing(self, products):
        layer = make_layer()[0].requires_grad_(requires_grad=False)
        x = new_input()
        layer(x)
        assert layer._shared._entry is None

    def test_it_is_released_with_its_input(self, group):
        x = new_input()
        group[0](x)
        assert is_left(group)
        del x
        assert not is_left(group)

    def test_it_keeps_no_input_alive(self, group):
        x = new_input()
        reference = weakref.ref(x)
        group[1](x)
        del x
        assert reference() is None

    def test_only_the_last_input_is_cached(self, group, products):
        first, second = new_input(seed=1), new_input(seed=2)
        group[0](first)
        for layer in group:
            check(layer, second, layer(second))
        check(group[1], first, group[1](first))
        assert len(products) == 3
        del first
        assert not is_left(group)

    def test_releasing_an_old_input_keeps_the_current_product(self, group):
        first, second = new_input(seed=1), new_input(seed=2)
        group[0](first)
        held = group[0]._shared._entry  # as another thread may, while it looks at it
        group[0](second)
        del first
        assert held.input() is None
        assert is_left(group)


class TestChanges:
    """Changes between the owner's call and the follower's."""

    def apply(self, group, products, change, x):
        group[0](x)
        change()
        check(group[1], x, group[1](x))
        assert len(products) == 2

    def test_a_changed_input_is_recomputed(self, group, products):
        x = new_input()
        self.apply(group, products, lambda: x.mul_(2), x)

    def test_an_input_changed_through_a_view_is_recomputed(self, group, products):
        x = new_input()
        self.apply(group, products, x[1:].zero_, x)

    def test_a_changed_dictionary_is_recomputed(self, group, products):
        self.apply(group, products, lambda: group[0].weight_u.mul_(2), new_input())

    def test_a_reloaded_dictionary_is_recomputed(self, group, products):
        state = {name: tensor.clone() for name, tensor in group[0].state_dict().items()}
        state["weight_u"] *= 2
        self.apply(group, products, lambda: group[0].load_state_dict(state), new_input())

    def test_a_replaced_dictionary_is_recomputed(self, group, products):
        once, twice = (torch.nn.Parameter(group[0].weight_u * factor, requires_grad=False) for factor in (1, 2))
        assert once._version == twice._version
        group[0].weight_u = once
        self.apply(group, products, lambda: setattr(group[0], "weight_u", twice), new_input())

    def test_a_change_of_autocasting_is_recomputed(self, group, products):
        x = new_input()
        with torch.autocast("cpu", torch.bfloat16):
            assert group[0](x).dtype == torch.bfloat16
        assert group[1](x).dtype == torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            assert [layer(x).dtype for layer in group] == [torch.bfloat16] * 3
        assert len(products) == 3

    def test_a_change_of_grad_mode_is_recomputed(self, group, products):
        x = new_input(requires_grad=True)
        with torch.no_grad():
            group[0](x)
        group[1](x).sum().backward()
        torch.testing.assert_close(x.grad, group[1].dense_weight().sum(0).expand_as(x))
        assert len(products) == 2


class TestTraining:
    """Gradients of the input and of all parameters, compared with those of dense layers by the chain rule."""

    def check(self, run):
        made, _ = make_group(torch.float64)
        x = new_input().double().requires_grad_()
        run(made, x)
        assert not is_left(made)

        twins, weights = make_group(torch.float64)
        inputs = x.detach().clone().requires_grad_()
        atoms = twins[0].weight_u.detach().clone().requires_grad_()
        for layer, twin, weight in zip(made, twins, weights, strict=True):
            rows, bias = (p.detach().clone().requires_grad_() for p in (twin.coefficients, twin.bias))
            torch.testing.assert_close(rows @ atoms, weight)
            (inputs @ (rows @ atoms).T + bias).square().sum().backward()
            torch.testing.assert_close(layer.bias.grad, bias.grad)
            torch.testing.assert_close(layer.coefficients.grad, rows.grad * unpack_bits(twin.weight_mask, RANK))
        torch.testing.assert_close(made[0].weight_u.grad, atoms.grad)
        torch.testing.assert_close(x.grad, inputs.grad)

    def test_gradients_equal_those_of_dense_layers(self):
        self.check(lambda made, x: sum(layer(x).square().sum() for layer in made).backward())

    def test_backward_works_layer_by_layer(self):
        def run(made, x):
            for layer in made:
                layer(x).square().sum().backward()

        self.check(run)

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_checkpointing_can_recompute_the_group(self, reentrant):
        def run(made, x):
            together = lambda z: sum(layer(z).square().sum() for layer in made)  # noqa: E731
            checkpoint(together, x, use_reentrant=reentrant).backward()

        self.check(run)

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_checkpointing_can_recompute_each_layer(self, reentrant):
        def run(made, x):
            sum(checkpoint(layer, x, use_reentrant=reentrant).square().sum() for layer in made).backward()

        self.check(run)

    def test_a_frozen_dictionary_passes_gradients(self, group):
        x = new_input(requires_grad=True)
        for layer in group:
            layer(x).sum().backward()
        torch.testing.assert_close(x.grad, sum(layer.dense_weight().sum(0) for layer in group).expand_as(x))

    def test_training_updates_the_shared_dictionary(self):
        made, _ = make_group()
        optimizer = torch.optim.SGD([p for layer in made for p in layer.parameters() if p.requires_grad], lr=0.1)
        x = new_input()
        before = [layer(x).detach() for layer in made]
        made[1](x).square().sum().backward()
        optimizer.step()
        assert all(not torch.allclose(layer(x), old) for layer, old in zip(made, before, strict=True))


class TestOtherModes:
    def test_inference_mode_shares_nothing(self, group, products):
        with torch.inference_mode():
            x = new_input()
            group[0](x)
            x.mul_(2)
            check(group[1], x, group[1](x))
        assert len(products) == 2

    def test_vmap_shares_the_product(self, group, products):
        x = new_input()
        for layer, result in zip(group, torch.vmap(lambda z: tuple(layer(z) for layer in group))(x), strict=True):
            check(layer, x, result)
        assert len(products) == 1
        assert not is_left(group)


class TestReference:
    """A follower refers to its dictionary owner, and does not own it."""

    def test_the_owner_is_not_a_submodule_of_the_follower(self):
        owner, follower, _ = make_group()[0]
        assert list(follower.children()) == []
        assert {name for name, _ in follower.named_parameters()} == {"coefficients", "weight_mask", "bias"}
        assert follower.dictionary_owner is owner
        assert owner.dictionary_owner is owner

    def test_a_copy_refers_to_the_copied_leader(self, group):
        x = new_input()
        group[0](x)
        model = torch.nn.ModuleList(reversed(group))  # the followers first
        twin = copy.deepcopy(model)
        assert twin[0].dictionary_owner is twin[1].dictionary_owner is twin[2]
        assert twin[2].followers == 2
        assert not is_left([twin[2]])
        twin[2].weight_u.mul_(2)
        check(twin[1], x, twin[1](x))
        check(group[1], x, group[1](x))
        assert not torch.allclose(twin[1](x), group[1](x))

    def test_the_group_can_change_its_dtype(self, group):
        model = torch.nn.ModuleList(group).double()
        x = new_input().double()
        for layer in model:
            check(layer, x, layer(x))

    def test_the_cache_does_not_outlive_the_model(self):
        made, _ = make_group()
        references = [weakref.ref(layer) for layer in made]
        with torch.no_grad():
            made[0](new_input())
        del made
        gc.collect()
        assert [reference() for reference in references] == [None] * 3

    def test_a_owner_must_fit(self):
        owner, follower, _ = make_group()[0]
        with pytest.raises(AssertionError, match="owns no dictionary"):
            FactorizedLinear(D_IN, D_OUT, rank=RANK, nnz=3, dictionary_owner=follower)
        with pytest.raises(AssertionError, match="does not fit"):
            FactorizedLinear(D_IN + 1, D_OUT, rank=RANK, nnz=3, dictionary_owner=owner)
