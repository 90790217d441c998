import copy

import pytest
import torch

from rocket_core.calibration.grams import InputGroup, collect_statistics, find_input_groups
from rocket_core.errors import NonFiniteCalibrationError
from rocket_core.models.architecture import build_architecture, oriented_weight
from rocket_core.models.block_calls import Activations, placeholders, record_block_inputs
from rocket_core.models.recorded_call import BlockCall
from tests.reference.tiny_models import ALL_FAMILIES, FAMILIES, VOCAB_SIZE, tiny_inputs

# Input groups of the first and the last block.
GROUPS = {
    "llama": [{"q_proj", "k_proj", "v_proj"}, {"o_proj"}, {"gate_proj", "up_proj"}, {"down_proj"}],
    "qwen3": [{"q_proj", "k_proj", "v_proj"}, {"o_proj"}, {"gate_proj", "up_proj"}, {"down_proj"}],
    "mistral": [{"q_proj", "k_proj", "v_proj"}, {"o_proj"}, {"gate_proj", "up_proj"}, {"down_proj"}],
    "gemma": [{"q_proj", "k_proj", "v_proj"}, {"o_proj"}, {"gate_proj", "up_proj"}, {"down_proj"}],
    "phi3": [{"qkv_proj"}, {"o_proj"}, {"gate_up_proj"}, {"down_proj"}],
    "gpt2": [{"c_attn"}, {"c_proj"}, {"c_fc"}, {"c_proj"}],
    "openai_gpt": [{"c_attn"}, {"c_proj"}, {"c_fc"}, {"c_proj"}],
    "opt": [{"q_proj", "k_proj", "v_proj"}, {"out_proj"}, {"fc1"}, {"fc2"}],
    "gpt_neox": [{"query_key_value"}, {"dense"}, {"dense_h_to_4h"}, {"dense_4h_to_h"}],
    "falcon": [{"query_key_value", "dense_h_to_4h"}, {"dense"}, {"dense_4h_to_h"}],
    "mistral_embedding": [{"q_proj", "k_proj", "v_proj"}, {"o_proj"}, {"gate_proj", "up_proj"}, {"down_proj"}],
    "qwen3_tagger": [{"q_proj", "k_proj", "v_proj"}, {"o_proj"}, {"gate_proj", "up_proj"}, {"down_proj"}],
    "llama_reward": [{"q_proj", "k_proj", "v_proj"}, {"o_proj"}, {"gate_proj", "up_proj"}, {"down_proj"}],
    "bert": [{"query", "key", "value"}, {"dense"}, {"dense"}, {"dense"}],
    "roberta": [{"query", "key", "value"}, {"dense"}, {"dense"}, {"dense"}],
    "distilbert": [{"q_lin", "k_lin", "v_lin"}, {"out_lin"}, {"lin1"}, {"lin2"}],
    "vit": [{"q_proj", "k_proj", "v_proj"}, {"o_proj"}, {"fc1"}, {"fc2"}],
    "siglip_vision": [{"q_proj", "k_proj", "v_proj"}, {"out_proj"}, {"fc1"}, {"fc2"}],
    "t5": [{"q", "k", "v"}, {"o"}, {"wi_0", "wi_1"}, {"wo"}],
    "whisper": [{"q_proj", "k_proj", "v_proj"}, {"out_proj"}, {"fc1"}, {"fc2"}],
}
CROSS_ATTENTION = {
    "t5": [{"q", "k", "v"}, {"o"}, {"q"}, {"k", "v"}, {"o"}, {"wi_0", "wi_1"}, {"wo"}],
    "whisper": [
        {"q_proj", "k_proj", "v_proj"},
        {"out_proj"},
        {"q_proj"},
        {"k_proj", "v_proj"},
        {"out_proj"},
        {"fc1"},
        {"fc2"},
    ],
}


def tokens(windows=6, length=24, seed=0):
    return torch.randint(3, VOCAB_SIZE, (windows, length), generator=torch.Generator().manual_seed(seed))


def walk(model, batches, architecture, *, dtype=torch.float64):
    """Return statistics of every layer by this library, and the groups of each block."""
    statistics, groups, passed, activations = {}, [], None, None
    for part in architecture.lists:
        blocks = model.get_submodule(part.name)
        activations = record_block_inputs(
            model, blocks, batches, passed=passed, states=Activations(hidden=[], calls=[], first=part.first)
        )
        for index, block in enumerate(blocks, start=part.first):
            modules = {name: model.get_submodule(name) for name in architecture.layers[index]}
            shapes = {name: architecture.shape(name) for name in modules}
            found = find_input_groups(modules, shapes, lambda: activations.run(block, index, 0))  # noqa: B023
            groups.append(found)
            statistics |= collect_statistics(
                modules,
                found,
                lambda batch: activations.step(block, index, batch),  # noqa: B023
                batches=len(batches),
                dtype=dtype,
            )
        passed = blocks, activations
    return statistics, groups, activations


def in_double(inputs):
    return {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}


def built(model, dtype=torch.float64):
    """Return the architecture of the model's own class, with the names of its modules."""
    model.config.architectures = [type(model).__name__]
    return build_architecture(model.config, dtype)


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_blockwise_statistics_equal_those_of_the_whole_model(family):
    model = ALL_FAMILIES[family]().double()
    architecture = built(model)
    inputs = in_double(tiny_inputs(model, samples=6))
    batches = [{name: value[part] for name, value in inputs.items()} for part in (slice(0, 4), slice(4, 6))]
    statistics, groups, _ = walk(model, batches, architecture)

    seen = {}
    names = [name for block in architecture.layers for name in block]
    handles = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _module, args, name=name: seen.setdefault(name, []).append(args[0].reshape(-1, args[0].shape[-1]))
        )
        for name in names
    ]
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()

    assert statistics.keys() == set(names)
    for name in names:
        rows = torch.cat(seen[name])
        gram = rows.T @ rows
        found = statistics[name]
        assert found.tokens == len(rows)
        torch.testing.assert_close(found.input_energy, gram.diagonal())
        if found.gram is not None:
            torch.testing.assert_close(found.gram, gram)
        else:
            weight = oriented_weight(model.get_submodule(name))
            torch.testing.assert_close(found.output_gram, weight.T @ gram @ weight)
    for found, expected in (groups[0], GROUPS[family]), (groups[-1], CROSS_ATTENTION.get(family, GROUPS[family])):
        assert [{name.rsplit(".", 1)[1] for name in group.layers} for group in found] == expected


def test_the_last_block_outputs_what_the_model_computes():
    model = FAMILIES["llama"]().double()
    architecture = build_architecture(model.config, torch.float64)
    _, _, activations = walk(model, tokens().split(4), architecture)
    with torch.no_grad():
        expected = model.model(tokens(), use_cache=False).last_hidden_state
        torch.testing.assert_close(model.model.norm(torch.cat(activations.hidden)), expected)


def test_grams_of_two_halves_add_up():
    model = FAMILIES["llama"]().double()
    architecture = build_architecture(model.config, torch.float64)
    whole, _, _ = walk(model, [tokens()], architecture)
    first, _, _ = walk(model, [tokens()[:2]], architecture)
    second, _, _ = walk(model, [tokens()[2:]], architecture)
    for name, statistics in whole.items():
        which = "gram" if statistics.gram is not None else "output_gram"
        added = getattr(first[name], which) + getattr(second[name], which)
        torch.testing.assert_close(getattr(statistics, which), added)


def test_a_shared_input_is_summed_once():
    model = FAMILIES["llama"]().double()
    architecture = build_architecture(model.config, torch.float64)
    statistics, _, _ = walk(model, [tokens()], architecture)
    gate, up = (statistics[f"model.layers.0.mlp.{name}_proj"] for name in ("gate", "up"))
    assert gate.gram is up.gram


def test_the_smaller_side_is_collected():
    model = FAMILIES["llama"]().double()
    architecture = build_architecture(model.config, torch.float64)
    statistics, _, _ = walk(model, [tokens()], architecture)
    down = statistics["model.layers.0.mlp.down_proj"]
    assert down.gram is None
    assert down.output_gram.shape == (32, 32)
    assert statistics["model.layers.0.mlp.up_proj"].gram.shape == (32, 32)


def test_blocks_are_restored_after_recording_or_failure():
    model = FAMILIES["llama"]()
    before = list(model.model.layers)
    record_block_inputs(model, model.model.layers, [tokens()])
    assert list(model.model.layers) == before
    with pytest.raises(IndexError):
        record_block_inputs(model, model.model.layers, [torch.full((1, 4), VOCAB_SIZE + 5)])
    assert list(model.model.layers) == before


def test_the_output_of_a_stand_in_becomes_an_ordinary_tensor():
    blocks = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    hidden = torch.ones(3, 2)
    with placeholders(blocks, lambda _index, hidden, _call: hidden):
        output = blocks[0](hidden)
        assert output[0].shape == (3, 2)
        assert (output * 1)[0].shape == (2,)
        assert blocks[0].in_features == 2


def test_arguments_shared_by_batches_are_stored_once():
    model = FAMILIES["llama"]()
    activations = record_block_inputs(model, model.model.layers, tokens().split(2))
    first, second = (calls[0].kwargs["position_embeddings"] for calls in activations.calls[:2])
    assert first[0] is second[0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_activations_name_layer_and_batch(value):
    model = FAMILIES["llama"]().double()
    architecture = build_architecture(model.config, torch.float64)
    broken = copy.deepcopy(model)
    broken.model.embed_tokens.weight.data[7] = value
    first, second = tokens()[:2].clamp(min=8), tokens()[2:4].clone()
    second[0, 0] = 7
    with pytest.raises(NonFiniteCalibrationError, match=r"model\.layers\.0\.self_attn\.q_proj.*batch 1"):
        walk(broken, [first, second], architecture)


def test_an_uncalled_layer_is_in_no_group():
    used, unused = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    groups = find_input_groups({"used": used, "unused": unused}, {"used": (4, 4)}, lambda: used(torch.ones(2, 4)))
    assert groups == (InputGroup(layers=("used",), from_output=False),)


def test_equal_values_in_different_tensors_are_different_inputs():
    one, two = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    shapes = {"one": (4, 4), "two": (4, 4)}
    groups = find_input_groups({"one": one, "two": two}, shapes, lambda: (one(torch.ones(2, 4)), two(torch.ones(2, 4))))
    assert [group.layers for group in groups] == [("one",), ("two",)]


def test_a_tensor_changed_in_place_is_another_input():
    one, two = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    shared = torch.ones(2, 4)
    shapes = {"one": (4, 4), "two": (4, 4)}
    groups = find_input_groups({"one": one, "two": two}, shapes, lambda: (one(shared), shared.add_(1), two(shared)))
    assert len(groups) == 2


def test_a_layer_with_two_inputs_is_summed_and_not_shared():
    one, two = torch.nn.Linear(4, 4).double(), torch.nn.Linear(4, 4).double()
    first, second = torch.rand(2, 3, 4, dtype=torch.float64)
    layers, shapes = {"one": one, "two": two}, {"one": (4, 4), "two": (4, 4)}
    run = lambda _batch=0: (one(first), two(first), one(second))  # noqa: E731
    groups = find_input_groups(layers, shapes, run)
    assert [group.layers for group in groups] == [("one",), ("two",)]
    statistics = collect_statistics(layers, groups, run, batches=1, dtype=torch.float64)
    torch.testing.assert_close(statistics["one"].gram, first.T @ first + second.T @ second)
    torch.testing.assert_close(statistics["two"].gram, first.T @ first)


def test_a_large_bias_does_not_drown_the_output_in_low_precision():
    layer = torch.nn.Linear(64, 16).bfloat16()
    layer.bias.data.fill_(300.0)
    inputs = torch.randn(200, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    groups = find_input_groups({"layer": layer}, {"layer": (64, 16)}, lambda: layer(inputs))
    found = collect_statistics({"layer": layer}, groups, lambda _batch: layer(inputs), batches=1, dtype=torch.float32)
    outputs = inputs.double() @ layer.weight.detach().double().T
    torch.testing.assert_close(found["layer"].output_gram, outputs.T @ outputs, rtol=1e-4, atol=1e-2)


def test_blocks_that_return_a_tuple_are_supported():
    class Block(torch.nn.Module):
        def forward(self, hidden, scale):
            return hidden * scale, None

    activations = Activations(hidden=[torch.ones(1, 2)], calls=[[]])
    activations.calls[0].append(BlockCall(args=(3.0,), kwargs={}))
    activations.step(Block(), 0, 0)
    assert torch.equal(activations.hidden[0], torch.full((1, 2), 3.0))


@pytest.mark.parametrize("wide", [False, True], ids=["input", "output"])
def test_weighted_tokens_count_as_often_as_they_weigh(wide):
    layer = torch.nn.Linear(16 if wide else 4, 5, dtype=torch.float64).requires_grad_(requires_grad=False)
    rows = torch.randn(2, 8, layer.in_features, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights = torch.tensor([0.5, 2, 1, 0, 3, 0.25, 1, 1, 4, 1, 1, 0.5, 1, 0.25, 0, 2], dtype=torch.float64)
    group = InputGroup(layers=("one",), from_output=wide)
    found = collect_statistics(
        {"one": layer},
        [group],
        lambda batch: layer(rows[batch]),
        batches=2,
        dtype=torch.float64,
        weights=lambda names: weights if list(names) == ["one"] else None,
    )["one"]
    flat, weights = rows.flatten(0, 1)[:14], weights[:14]
    gram = flat.mT @ (flat * weights[:, None])
    assert found.tokens == 14
    torch.testing.assert_close(found.held_out, rows[1, 6:])
    if not wide:
        counted = weights.sum() ** 2 / weights.square().sum()
        gram += 0.5 * layer.in_features / counted * gram.diagonal().diag()
    torch.testing.assert_close(found.input_energy, gram.diagonal())
    if wide:
        torch.testing.assert_close(found.output_gram, layer.weight @ gram @ layer.weight.mT)
    else:
        torch.testing.assert_close(found.gram, gram)


@pytest.mark.parametrize("token", [0, 15], ids=["summed", "held out"])
def test_infinite_inputs_of_weighted_tokens_are_refused(token):
    layer = torch.nn.Linear(4, 5)
    rows = torch.ones(1, 16, 4)
    rows[0, token, 1] = torch.inf
    group = InputGroup(layers=("one",), from_output=False)
    with pytest.raises(NonFiniteCalibrationError, match="layer one are NaN or infinite in calibration batch 0"):
        collect_statistics(
            {"one": layer},
            [group],
            lambda _batch: layer(rows),
            batches=1,
            dtype=torch.float32,
            weights=lambda _names: torch.ones(16),
        )
