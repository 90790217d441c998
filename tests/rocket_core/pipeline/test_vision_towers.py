"""Vision towers, compressed together with the decoders that they encode images for."""

import json
import os
import signal

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from app.shared.fork_server import ForkServer
from rocket_core.checkpoint import find_model
from rocket_core.errors import CalibrationError, InvalidConfigError
from rocket_core.pipeline import compress
from rocket_core.pipeline.block_walk import BlockWalk
from rocket_core.pipeline.preflight import prepare_run
from rocket_core.pipeline.stages.sensitivity import measure_sensitivities
from tests.reference.observers import Watch
from tests.reference.sensitivity import silent_monitor, squared_gradients
from tests.reference.tiny_vision import save_tiny_processor, save_tiny_vision, stand_in_for_libraries
from tests.sampling import sweep

# Features that leave the tower early and are added between the decoder's blocks; a tower whose last block is not used;
# blocks that call the hidden states otherwise, before a mixture.
KEPT = ["qwen3_vl", "llava", "llama4"]
OTHERS = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl_moe", "idefics3", "smolvlm", "gemma3"]
FAMILIES = sweep(KEPT, soak=OTHERS)
stand_in_for_libraries()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return complete checkpoints of the tiny families with their processors, made once."""
    made = {}

    def make(family):
        if family not in made:
            path = tmp_path_factory.mktemp("vision") / family
            made[family] = save_tiny_processor(family, save_tiny_vision(family, path))
        return made[family]

    return make


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Return a calibration file with an image in every line."""
    generator = np.random.default_rng(0)
    data = tmp_path_factory.mktemp("data")
    lines = []
    for number in range(6):
        pixels = generator.integers(0, 255, (32 + number, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(data / f"{number}.png")
        lines.append(json.dumps({"image": f"{number}.png", "text": f"picture {number}"}))
    file = data / "captions.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.fixture(scope="module")
def vision(images, settings):
    """Return settings that include the tower; keywords override."""

    def make(**changes):
        calibration = {"dataset": str(images), "samples": 6, "sequence_length": 48}
        return settings(**({"preset": "fast", "include": ("vision",), "calibration": calibration} | changes))

    return make


@pytest.fixture(scope="module")
def compressed(tmp_path_factory, folder, vision):
    """Return the output folder and the report of an uninterrupted run of a family."""
    made = {}

    def make(family):
        if family not in made:
            output = tmp_path_factory.mktemp("compressed") / family
            made[family] = output, compress(str(folder(family)), output, vision(kinds=("factored",)))
        return made[family]

    return make


def load(path):
    return AutoModelForImageTextToText.from_pretrained(path)


def opened(folder, config):
    """Return a run and its calibration samples."""
    run = prepare_run(find_model(str(folder)), config)
    return run, run.inputs.draw(run.config.calibration)


def batches(inputs):
    return list(inputs.batches(1, torch.device("cpu"), torch.float32))


@torch.no_grad()
def read_by(model, module, inputs, *, output=False):
    """Return what a module of the whole model reads, or returns, for each sample."""
    seen = []

    def note(_module, args, kwargs, *outputs):
        found = outputs[0] if output else next(iter((*args, *kwargs.values())))
        seen.append((found[0] if isinstance(found, tuple) else found).clone())

    register = module.register_forward_hook if output else module.register_forward_pre_hook
    handle = register(note, with_kwargs=True)
    for batch in batches(inputs):
        model(**batch)
    handle.remove()
    return seen


@pytest.mark.parametrize("family", FAMILIES)
class TestEveryFamily:
    def test_all_layers_in_blocks_of_the_tower_are_selected(self, family, compressed, folder):
        _, report = compressed(family)
        towers = {layer.name: layer.kind for layer in report.layers if "vis" in layer.name}
        linear = {
            name
            for name, module in load(folder(family)).named_modules()
            if type(module) is torch.nn.Linear and "vis" in name and (".layers." in name or ".blocks." in name)
        }
        assert towers.keys() == linear
        assert "factored" in towers.values()
        assert len(report.layers) > len(towers)
        assert not report.skipped

    def test_the_artifact_loads_and_generates_alike(self, family, compressed, folder, vision):
        output, report = compressed(family)
        models = [load(output / kind) for kind in ("rocket", "dense")]
        _, inputs = opened(folder(family), vision())
        sample = batches(inputs)[0]
        with torch.no_grad():
            found = [model(**sample).logits for model in models]
            before = load(folder(family))(**sample).logits
        torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)
        assert not torch.allclose(found[0], before, atol=1e-2)
        tokens = [model.generate(**sample, max_new_tokens=4, do_sample=False) for model in models]
        assert torch.equal(*tokens)
        stored, source = (load_file(path / "model.safetensors") for path in (output / "dense", folder(family)))
        names = {name for name in source if not torch.equal(source[name], stored[name])}
        changed = [layer.name for layer in report.layers if layer.kind != "dense"]
        # All experts of a block are in one tensor.
        assert len(names) == len(changed) or any(".experts." in name for name in changed)

    def test_dequantizing_equals_the_dense_export(self, family, compressed, tmp_path):
        output, _ = compressed(family)
        load(output / "rocket").dequantize().save_pretrained(tmp_path)
        found, dense = (load_file(path / "model.safetensors") for path in (tmp_path, output / "dense"))
        assert found.keys() == dense.keys()
        assert all(torch.equal(value, dense[key]) for key, value in found.items())

    def test_the_walk_matches_the_whole_model(self, family, folder, vision):
        run, inputs = opened(folder(family), vision())
        whole = load(folder(family))
        walk = BlockWalk(run, inputs, lambda: None)
        for blocks in run.architecture.lists:
            walk.advance_to(blocks.stop - 1)
            expected = read_by(whole, whole.get_submodule(blocks.name)[-1], inputs)
            for found, state in zip(walk._states.hidden, expected, strict=True):
                torch.testing.assert_close(found, state, rtol=1e-5, atol=1e-5)

    def test_sensitivities_are_those_of_the_whole_model(self, family, folder, vision, open_work):
        run, inputs = opened(folder(family), vision(token_weights="none"))  # noqa: S106 - no password
        work = open_work(run, inputs)
        found = measure_sensitivities(run, inputs, work, silent_monitor(run), windows=len(inputs))
        names = [name for block in run.layers for name in block if ".experts." not in name]
        whole = load(folder(family))
        placeholder = whole.config.image_token_id
        total, tokens = dict.fromkeys(names, 0.0), 0
        for batch in batches(inputs):
            ids = batch["input_ids"]
            predicted = (ids != placeholder)[:, 1:, None]
            for name, squares in squared_gradients(whole, names, batch, predicted=predicted).items():
                total[name] = total[name] + squares * ids.numel()
            tokens += ids.numel()
        for name in names:
            torch.testing.assert_close(found[name].fisher_diagonal, total[name] / tokens, rtol=1e-3, atol=1e-8)


@pytest.fixture(scope="module")
def sequential(tmp_path_factory, folder, vision):
    """Return the model, settings, output folder, report and steps of a sequential run."""
    steps = []
    output = tmp_path_factory.mktemp("sequential") / "out"
    # Fewer layers, for time; those that read what the tower shows are left.
    ignore = ("*.visual.blocks.[12].*", "*.language_model.layers.[12].*")
    config = vision(preset="best", kinds=("factored",), objective="whitened", ratio=0.5, ignore=ignore)
    report = compress(str(folder("qwen3_vl")), output, config, observer=Watch(on_progress=steps.append))
    return folder("qwen3_vl"), config, output, report, steps


def test_the_decoder_is_compressed_for_a_compressed_tower(sequential):
    model, config, output, report, _ = sequential
    _, inputs = opened(model, config)
    name = "model.language_model.layers.0.self_attn.q_proj"
    layer = next(layer for layer in report.layers if layer.name == name)
    assert layer.kind == "factored"
    before, after = load(model), load(output / "dense")
    pairs = zip(
        *(read_by(whole, whole.get_submodule(name), inputs, output=True) for whole in (before, after)), strict=True
    )
    errors, energies = zip(*(((x - y).square().sum(), x.square().sum()) for x, y in pairs), strict=True)
    assert layer.achieved_error == pytest.approx(float(sum(errors) / sum(energies)) ** 0.5, rel=1e-3)


@pytest.mark.parametrize("kills", sweep([((0.3, 0.8),)], soak=[((0.05, 0.15, 0.5, 0.7, 0.9),)]))
def test_killed_repeatedly_it_resumes_to_the_same_bytes(kills, sequential, fingerprint, tmp_path):
    model, config, expected, _, steps = sequential
    killed_and_resumed(model, config, steps, kills, tmp_path)
    assert fingerprint(tmp_path / "out") == fingerprint(expected)


@pytest.mark.soak
@pytest.mark.parametrize("family", ["smolvlm", "llama4"])
def test_families_resume_after_kills_to_the_same_bytes(family, folder, vision, fingerprint, tmp_path):
    config, steps = vision(kinds=("factored",)), []
    compress(str(folder(family)), tmp_path / "expected", config, observer=Watch(on_progress=steps.append))
    killed_and_resumed(folder(family), config, steps, (0.2, 0.5, 0.9), tmp_path)
    assert fingerprint(tmp_path / "out") == fingerprint(tmp_path / "expected")


def killed_and_resumed(model, config, steps, kills, tmp_path):
    """Compress into a folder `out`: in processes that are killed at fractions of the steps, and then to the end."""
    output = tmp_path / "out"
    server = ForkServer("tests.rocket_core.pipeline.victim:run", environment=os.environ)
    try:
        for fraction in kills:
            step = next(index for index, progress in enumerate(steps) if progress.fraction >= fraction)
            (tmp_path / "arguments").write_text(json.dumps([str(model), str(output), config.model_dump_json(), step]))
            with (tmp_path / "arguments").open() as file, server.fork([file.fileno()]) as victim:
                assert victim.wait(300) == -signal.SIGKILL
    finally:
        server.close()
    compress(str(model), output, config, resume=True)


@pytest.mark.soak
def test_the_blocks_of_a_tower_are_refined(folder, vision, tmp_path):
    config = vision(preset="max", ratio=0.4, kinds=("factored",), objective="whitened")
    report = compress(str(folder("llava")), tmp_path / "out", config)
    assert any("vision_tower" in block.name for block in report.refinement)
    assert all(block.error_after <= block.error_before for block in report.refinement)


def test_a_size_is_met_with_tower_and_embeddings(folder, vision, tmp_path):
    size = sum(file.stat().st_size for file in folder("qwen3_vl").glob("*.safetensors")) * 7 // 10
    config = vision(ratio=None, target_bytes=size, cap_slack=0.0, export=("rocket",))
    report = compress(str(folder("qwen3_vl")), tmp_path / "out", config)
    assert report.tables == ("model.language_model.embed_tokens",)
    assert 0.9 * size <= report.exports[0].stored_bytes <= size
    quantized = [layer for layer in report.layers if ".visual." in layer.name and layer.kind != "dense"]
    assert quantized


def test_a_line_without_an_image_is_refused(folder, vision, images, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"text": "no picture"}) + "\n")
    calibration = {"samples": 2, "sequence_length": 48}
    with pytest.raises(CalibrationError, match="line 1 has no image, and include vision calibrates"):
        opened(folder("llava"), vision(calibration=calibration | {"dataset": str(data)}))
    mixed = images.parent / "mixed.jsonl"
    mixed.write_text(images.read_text() + data.read_text())
    with pytest.raises(CalibrationError, match="line 7 has no image"):
        opened(folder("llava"), vision(calibration=calibration | {"dataset": str(mixed), "samples": 7}))


def test_a_model_without_a_tower_is_refused(model_folder, vision):
    with pytest.raises(InvalidConfigError, match="LlamaForCausalLM has no tower that encodes images"):
        prepare_run(find_model(str(model_folder("llama"))), vision())
