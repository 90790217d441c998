"""Runs that refine each block after its layers are compressed."""

import json
import os
import signal

import pytest
import torch
from safetensors import safe_open

from app.shared.fork_server import ForkServer
from rocket_core.errors import InvalidConfigError
from rocket_core.pipeline import compress
from rocket_core.pipeline.stages.units import CodedSizes
from rocket_core.refinement import BlockErrors, BlockTuning
from tests.reference.observers import Watch

KINDS = {
    "parameters": {"ratio": 0.4},
    "file": {"ratio": 0.8, "budget": "bytes"},
    "memory": {"ratio": 0.8, "budget": "bytes", "storage": "memory"},
}


@pytest.fixture(scope="module")
def refining(settings, text):
    def make(**changes):
        calibration = {"dataset": str(text), "samples": 64, "sequence_length": 64}
        small = {"preset": "max", "sensitivity_samples": 4, "export": ("rocket",), "calibration": calibration}
        return settings(**(small | changes))

    return make


def tensors_of(folder):
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 - not a dict
    return found


@pytest.fixture(scope="module")
def outputs(tmp_path_factory, model_folder, refining):
    """Return the output folders without and with tuning of the blocks, and the reports."""
    made = {}

    def run(case, folder):
        return folder, compress(str(model_folder("llama")), folder, refining(**KINDS[case]))

    def make(case):
        if case not in made:
            folder = tmp_path_factory.mktemp("refined")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(BlockTuning, "complete", lambda _self, **_: BlockErrors(before=1.0, after=1.0))
                before = run(case, folder / "before")
            made[case] = before, run(case, folder / "after")
        return made[case]

    return make


@pytest.mark.parametrize("case", KINDS)
def test_sizes_stay_and_no_block_gets_worse(outputs, case):
    (before, plain), (after, refined) = outputs(case)
    assert all(block.error_after == block.error_before for block in plain.refinement)
    assert [block.name for block in refined.refinement] == ["model.layers.0", "model.layers.1"]
    assert all(block.error_after <= block.error_before for block in refined.refinement)
    if case == "parameters":
        assert any(block.error_after < 0.95 * block.error_before for block in refined.refinement)
    bytes_of = [sum(layer.stored_bytes for layer in report.layers) for report in (plain, refined)]
    assert bytes_of[1] <= (bytes_of[0] if case == "parameters" else refined.allocation.budget)
    first, last = tensors_of(before / "rocket"), tensors_of(after / "rocket")
    assert first.keys() == last.keys()
    assert {name: tensor.dtype for name, tensor in first.items()} == {n: tensor.dtype for n, tensor in last.items()}
    changed = {name.rpartition(".")[2] for name in first if not same(first[name], last[name])}
    # Codes of random weights are hardly ever better than those of the compression.
    assert "weight" in changed or case != "parameters"
    if case != "file":
        assert {name: tensor.shape for name, tensor in first.items()} == {n: tensor.shape for n, tensor in last.items()}


@pytest.mark.parametrize("case", KINDS)
def test_supports_and_scales_stay_in_a_block(outputs, case):
    # Later blocks are compressed for the outputs of the first, which refinement changes.
    (before, _), (after, _) = outputs(case)
    first, last = tensors_of(before / "rocket"), tensors_of(after / "rocket")
    kept = ("weight_mask",) if case == "parameters" else ("weight_mask", "weight_scale")
    names = [name for name in first if ".layers.0." in name and name.endswith(kept)]
    assert names
    assert all(same(first[name], last[name]) for name in names)


def same(left, right):
    return left.shape == right.shape and torch.equal(left, right)


def test_reports_have_the_bytes_in_the_files(outputs):
    for folder, report in outputs("file"):
        tensors = tensors_of(folder / "rocket")
        for layer in report.layers:
            if layer.kind != "dense":
                own = [tensor for name, tensor in tensors.items() if name.rpartition(".")[0] == layer.name]
                assert layer.stored_bytes == sum(tensor.nbytes for tensor in own), layer.name


def test_bytes_that_refinement_leaves_are_noted(tmp_path, model_folder, refining, monkeypatch):
    noted = {}
    monkeypatch.setattr(CodedSizes, "note_refined", lambda _sizes, stored: noted.update(stored))
    monkeypatch.setattr(BlockTuning, "complete", lambda _self, **_: BlockErrors(before=1.0, after=1.0))
    report = compress(str(model_folder("llama")), tmp_path, refining(**KINDS["file"]))
    assert noted == {layer.name: layer.stored_bytes for layer in report.layers if layer.kind != "dense"}


def test_norms_outside_of_blocks_are_left_alone(outputs):
    (before, _), (after, _) = outputs("parameters")
    first, last = tensors_of(before / "rocket"), tensors_of(after / "rocket")
    assert torch.equal(first["model.norm.weight"], last["model.norm.weight"])
    assert torch.equal(first["model.embed_tokens.weight"], last["model.embed_tokens.weight"])
    assert not torch.equal(
        first["model.layers.0.input_layernorm.weight"], last["model.layers.0.input_layernorm.weight"]
    )


def test_killed_repeatedly_it_resumes_to_the_same_bytes(tmp_path, model_folder, refining, outputs, fingerprint):
    config = refining(**KINDS["file"])
    steps = []
    compress(str(model_folder("llama")), tmp_path / "counted", config, observer=Watch(on_progress=steps.append))
    expected = fingerprint(outputs("file")[1][0])
    assert fingerprint(tmp_path / "counted") == expected
    begin = next(index for index, progress in enumerate(steps) if progress.stage == "factorizing")
    end = next(index for index, progress in enumerate(steps) if progress.stage == "exporting")
    server = ForkServer("tests.rocket_core.pipeline.victim:run", environment=os.environ)
    try:
        # In the first block, and in the second one, where the first is refined already.
        for part in (0.3, 0.45):
            step = begin + int(part * (end - begin))
            arguments = [str(model_folder("llama")), str(tmp_path / "out"), config.model_dump_json(), step]
            (tmp_path / "arguments").write_text(json.dumps(arguments))
            with (tmp_path / "arguments").open() as file, server.fork([file.fileno()]) as victim:
                assert victim.wait(300) == -signal.SIGKILL
    finally:
        server.close()
    compress(str(model_folder("llama")), tmp_path / "out", config, resume=True)
    assert fingerprint(tmp_path / "out") == expected


def test_progress_never_falls_and_names_layers(tmp_path, model_folder, refining):
    seen = []
    compress(str(model_folder("llama")), tmp_path / "out", refining(), observer=Watch(on_progress=seen.append))
    fractions = [progress.fraction for progress in seen]
    assert fractions == sorted(fractions)
    assert len({progress.fraction for progress in seen if progress.stage == "factorizing"}) > 100


def test_a_single_sample_is_refused(tmp_path, model_folder, refining, text):
    calibration = {"dataset": str(text), "samples": 1, "sequence_length": 32}
    with pytest.raises(InvalidConfigError, match="at least 2 samples"):
        compress(str(model_folder("llama")), tmp_path / "out", refining(calibration=calibration))


@pytest.mark.parametrize("family", ["gpt2", "opt", "bert", "t5"])
def test_families_with_other_layers_and_biases(tmp_path, model_folder, refining, family):
    report = compress(str(model_folder(family)), tmp_path / "out", refining())
    assert report.refinement
    assert all(block.error_after <= block.error_before for block in report.refinement)
