"""Footprint of a model from its headers, compared with the model itself."""

import json
from dataclasses import replace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from rocket_core.checkpoint import find_model
from rocket_core.config import compression_config
from rocket_core.errors import UnsupportedArchitectureError
from rocket_core.estimates.batch_size import tokens_per_batch
from rocket_core.estimates.footprint import (
    Workload,
    describe_model,
    estimate_footprint,
    rocket_export_bytes,
    sensitivity_disk_bytes,
)
from rocket_core.estimates.tower_footprint import tower_workload
from rocket_core.inspection.files.safetensors_headers import local_weight_files, read_header
from rocket_core.inspection.headers.expert_stacks import MAX_EXPERTS, expert_layers, stack_of
from rocket_core.inspection.headers.model_fields import input_bytes, input_kind, positions, sample_positions
from rocket_core.inspection.headers.weight_summary import WeightSummary, summarize_files
from rocket_core.methods import method_for
from rocket_core.models.architecture import build_architecture, read_config
from rocket_core.pipeline.preflight import prepare_run
from rocket_core.pipeline.requirements import estimate_resources
from tests.reference.tiny_mixtures import EXPERTS, MIXTURES, save_tiny_mixture
from tests.reference.tiny_models import ALL_FAMILIES, HIDDEN_SIZE, MAX_POSITIONS, save_tiny_model
from tests.reference.tiny_vision import save_tiny_processor, save_tiny_vision, stand_in_for_libraries

stand_in_for_libraries()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    made = {}

    def saved(family):
        if family not in made:
            made[family] = save_tiny_model(family, tmp_path_factory.mktemp("models") / family)
        return made[family]

    return saved


def seen(folder, **how):
    config = json.loads((folder / "config.json").read_text())
    weights = summarize_files(read_header(file, file.name) for file in local_weight_files(folder, "m"))
    return config, describe_model(config, weights, **how)


@pytest.mark.parametrize("family", ALL_FAMILIES)
@pytest.mark.parametrize("ignore", [(), ("*.1.*",)])
def test_headers_describe_the_built_model(saved, family, ignore):
    folder = saved(family)
    config, model = seen(folder, ignore=ignore)
    architecture = build_architecture(read_config(folder), torch.float32)
    assert model.parameters == architecture.parameters
    kind = input_kind(config)
    assert positions(config) == (None if kind == "images" else MAX_POSITIONS)
    calibration = {"dataset": "builtin" if kind == "text" else "synthetic"}
    run = prepare_run(find_model(str(folder)), compression_config(ratio=0.3, ignore=ignore, calibration=calibration))
    shapes = sorted(architecture.shape(name) for block in run.layers for name in block)
    assert sorted(shape for block in model.layers for shape in block) == shapes
    for windows in (4, 4000):
        work = Workload(
            config=run.config,
            windows=windows,
            sequence_length=sample_positions(config, kind, run.sequence_length),
            input_bytes=input_bytes(config, kind),
            batch_tokens=tokens_per_batch("cpu"),
        )
        told, wanted = estimate_footprint(model, work), estimate_resources(run, windows)
        # Tied embeddings are stored once; nothing else differs but the headers of the files.
        assert told.memory_bytes == pytest.approx(wanted.memory_bytes, rel=0.01)
        assert told.disk_bytes == pytest.approx(wanted.disk_bytes, rel=0.05)


@pytest.mark.parametrize("family", ["llava", "qwen2_vl", "llama4"])
def test_a_selected_tower_is_described_as_it_is_built(family, tmp_path):
    folder = save_tiny_processor(family, save_tiny_vision(family, tmp_path / "model"))
    Image.new("RGB", (32, 32)).save(tmp_path / "1.png")
    (tmp_path / "data.jsonl").write_text('{"image": "1.png", "text": "a"}')
    calibration = {"dataset": str(tmp_path / "data.jsonl"), "sequence_length": 48}
    config = compression_config(ratio=0.3, include=("vision",), calibration=calibration)
    run = prepare_run(find_model(str(folder)), config)
    settings, model = seen(folder, vision=True)
    blocks = run.architecture.lists[0]
    tower = [run.architecture.shape(name) for block in run.layers[: blocks.length] for name in block]
    assert (model.tower.hidden_size, model.tower.widest) == (16, max(max(shape) for shape in tower))
    parameters = sum(x.numel() for x in run.architecture.blocks_of(blocks)[0].parameters())
    assert model.tower.block_parameters == parameters
    # The decoder is loaded with the whole tower.
    assert model.parameters - sum(model.block_parameters) >= parameters * blocks.length
    # Enough samples that the states of the tower are the largest.
    work = Workload(config=config, windows=10**6, sequence_length=48, **tower_workload(settings, 48))
    told, wanted = estimate_footprint(model, work), estimate_resources(run, 10**6)
    assert told.memory_bytes == pytest.approx(wanted.memory_bytes, rel=0.01)


def test_the_images_of_a_run_are_counted(tmp_path):
    folder = save_tiny_processor("llava", save_tiny_vision("llava", tmp_path / "model"))
    Image.new("RGB", (32, 32)).save(tmp_path / "1.png")
    (tmp_path / "data.jsonl").write_text('{"image": "1.png", "text": "a"}\n' * 3)
    calibration = {"dataset": str(tmp_path / "data.jsonl"), "sequence_length": 48}
    config = compression_config(ratio=0.3, include=("vision",), calibration=calibration)
    run = prepare_run(find_model(str(folder)), config)
    inputs = run.inputs.draw(run.config.calibration)
    assert inputs.numbers("pixel_values") == 3 * 3 * 32 * 32
    counted, usual = (estimate_resources(run, 3, found).memory_bytes for found in (inputs, None))
    # Besides pixels there are tokens, and the class token of the tower has none.
    assert abs(counted - usual) < inputs.stored_bytes
    larger = replace(
        inputs,
        tensors={
            name: tensor.repeat(1, 50, 1, 1) if tensor.ndim == 4 else tensor for name, tensor in inputs.tensors.items()
        },
    )
    assert estimate_resources(run, 3, larger).memory_bytes - counted >= 49 * 3 * 3 * 32 * 32 * 4


SETTINGS = [
    {},
    *({"method": method} for method in ("rocket-uniform", "svd-llm", "cospadi", "magnitude", "wanda")),
    {"preset": "paper"},
    {"preset": "fast"},
    {"preset": "best"},
    {"preset": "max"},
    {"sequential": True},
    {"kinds": ("sparse",)},
    {"method": "svd-llm", "sequential": True},
    {"method": "rocket-uniform", "kinds": ("sparse",)},
    {"method": "rtn", "ratio": None},
    {"method": "gptq", "ratio": None},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_input_grams_are_counted_if_the_method_needs_them(settings):
    config = compression_config(**{"ratio": 0.3, **settings})
    method = method_for(config, 4)
    assert Workload(config=config, windows=4, sequence_length=8).input_grams == method.needs_input_gram


def test_sequential_compression_counts_two_hidden_streams(saved):
    _, model = seen(saved("llama"))
    told = {}
    for sequential in (False, True):
        config = compression_config(ratio=0.3, objective="whitened", sequential=sequential, kinds=("sparse",))
        told[sequential] = estimate_footprint(model, Workload(config=config, windows=100_000, sequence_length=32))
    hidden = 100_000 * 32 * model.hidden_size * model.itemsize
    assert told[True].memory_bytes - told[False].memory_bytes >= 4 * hidden
    assert told[True].disk_bytes < told[False].disk_bytes


def test_refinement_counts_what_is_trained(saved):
    _, model = seen(saved("llama"))
    told = {}
    for preset in ("best", "max"):
        config = compression_config(ratio=0.3, preset=preset, kinds=("low_rank",))
        big = replace(model, block_parameters=(10**9,), parameters=10**9 + model.parameters)
        told[preset] = estimate_footprint(big, Workload(config=config, windows=8, sequence_length=32)).memory_bytes
    # Weights, gradients and two moments in float32 are the least.
    assert told["max"] - told["best"] >= 16 * 10**9


def test_the_disk_for_sensitivities_is_counted(saved):
    _, model = seen(saved("llama"))
    windows = {"windows": 50_000, "sequence_length": 32}
    plain, measured, few = (
        estimate_footprint(model, Workload(config=compression_config(ratio=0.3, **settings), **windows)).disk_bytes
        for settings in (
            {"objective": "whitened"},
            {"objective": "fisher", "sensitivity_samples": 60_000},
            {"objective": "fisher", "sensitivity_samples": 1, "token_weights": "none"},
        )
    )
    states = sensitivity_disk_bytes(model, windows=50_000, sequence_length=32)
    assert states <= measured < states + plain
    assert few == plain


def test_a_run_writes_no_more_than_estimated(saved, tmp_path):
    from rocket_core.pipeline import compress

    folder = saved("llama")
    _, model = seen(folder)
    (tmp_path / "text.txt").write_text("some text to calibrate on, again and again\n\n" * 300)
    calibration = {"dataset": str(tmp_path / "text.txt"), "samples": 4, "sequence_length": 32}
    report = compress(str(folder), tmp_path / "out", compression_config(ratio=0.3, calibration=calibration))
    assert report.totals.compressible_parameters == model.compressible_parameters
    assert report.totals.model_parameters == model.parameters
    # The header of the factored file describes more tensors than that of the dense one.
    tensors = load_file(tmp_path / "out" / "rocket" / "model.safetensors")
    stored = sum(tensor.nbytes for tensor in tensors.values())
    assert 0.8 * rocket_export_bytes(model, 0.3) < stored <= rocket_export_bytes(model, 0.3)


def test_other_towers_and_tables_are_not_layers(tmp_path):
    names = {
        "model.layers.0.self_attn.q_proj.weight": (8, 8),
        "model.layers.0.relative_attention_bias.weight": (8, 8),
        "model.layers.0.norm.bias": (8,),
        "vision.blocks.0.attn.weight": (4, 4),
        "embed.weight": (99, 8),
    }
    save_file({name: torch.zeros(shape) for name, shape in names.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"text_config": {"hidden_size": 8, "max_position_embeddings": 7}}')
    config, model = seen(tmp_path)
    assert model.layers == (((8, 8),),)
    assert model.block_parameters == (136,)
    assert positions(config) == 7
    assert seen(tmp_path, dtype="float16")[1].itemsize == 2


def names_of(run):
    return [name for block in run.layers for name in block]


@pytest.mark.parametrize("family", MIXTURES)
def test_layers_of_experts_are_those_of_a_run(family, tmp_path):
    folder = save_tiny_mixture(family, tmp_path)
    run = prepare_run(find_model(str(folder)), compression_config(ratio=0.3))
    _, model = seen(folder)
    # Routers look like layers, as do gates of shared experts, which are.
    routers = [(HIDDEN_SIZE, EXPERTS)]
    for names, described in zip(run.layers, model.layers, strict=True):
        actual = sorted(map(run.architecture.shape, names))
        assert sorted(described) in (actual, sorted(actual + routers))
    # Files also have the numbers by which some routers correct their choices.
    assert 0 <= model.parameters - run.architecture.parameters <= 2 * EXPERTS
    _, ignoring = seen(folder, ignore=("*.experts.*",))
    assert len(model.shapes) - len(ignoring.shapes) == len([name for name in names_of(run) if ".experts." in name])


@pytest.mark.parametrize(
    ("name", "stack", "expected"),
    [
        ("a.experts.gate_up_proj", (2, 12, 8), [("a.experts.0.gate_proj", (8, 6)), ("a.experts.0.up_proj", (8, 6))]),
        ("a.experts.gate_up_proj", (2, 8, 12), [("a.experts.0.gate_proj", (8, 6)), ("a.experts.0.up_proj", (8, 6))]),
        ("a.experts.down_proj", (2, 6, 8), [("a.experts.0.down_proj", (6, 8))]),
        ("a.moe.output_linear", (2, 8, 6), [("a.moe.experts.0.down_proj", (6, 8))]),
        ("a.experts.up_proj", (2, 6, 8), [("a.experts.0.up_proj", (8, 6))]),
        ("a.experts.gate_up_proj", (2, 12, 10), []),
    ],
)
def test_layers_are_found_in_a_tensor_of_all_experts(name, stack, expected):
    found = list(expert_layers(name, stack, 8))
    assert found[: len(expected)] == expected
    assert len(found) == 2 * len(expected)
    assert stack_of(name, stack) == stack
    assert stack_of(name, stack[1:]) is None
    assert stack_of("a.conv.weight", stack) is None
    assert stack_of(name, (MAX_EXPERTS + 1, *stack[1:])) is None


def test_a_model_without_layers_is_refused():
    weights = WeightSummary(dtype_bytes={"F32": 4}, block_shapes={})
    with pytest.raises(UnsupportedArchitectureError):
        describe_model({}, weights)
