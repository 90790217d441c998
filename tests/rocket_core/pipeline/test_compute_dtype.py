"""Checkpoints of half precision on a CPU: computed in float32, stored as they were."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.llama.modeling_llama import LlamaMLP

from rocket_core.evaluation import evaluate_text
from rocket_core.models.held_states import HeldStates
from rocket_core.pipeline import compress
from rocket_core.pipeline.context import Run
from rocket_core.pipeline.stages.sequential.compression import SequentialCompression
from rocket_core.system import devices


@pytest.fixture(scope="module", params=[torch.float16, torch.bfloat16], ids=str)
def half(request, tmp_path_factory, model_folder):
    """Return a checkpoint of half precision, and a float32 one of the same numbers."""
    folders = []
    for dtype in (request.param, torch.float32):
        folder = tmp_path_factory.mktemp("half") / str(dtype)
        folder.mkdir()
        for file in model_folder("llama").iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        weights = {
            name: tensor.to(request.param).to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()
        }
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"dtype": str(dtype).removeprefix("torch.")}))
        folders.append(folder)
    return folders


@pytest.fixture
def dtypes(monkeypatch):
    """Return the dtypes of the hidden states that reach a block's MLP."""
    seen = set()
    forward = LlamaMLP.forward

    def recorded(self, x):
        seen.add(x.dtype)
        return forward(self, x)

    monkeypatch.setattr(LlamaMLP, "forward", recorded)
    return seen


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    """Compute as on a CPU without instructions for bfloat16."""
    monkeypatch.setattr(devices, "multiplies_bfloat16", lambda: False)


def dtype_of(folder):
    return getattr(torch, json.loads((folder / "config.json").read_text())["dtype"])


@pytest.mark.parametrize("changes", [{}, {"sequential": True}, {"objective": "fisher"}], ids=str)
def test_half_precision_runs_in_float32_on_a_cpu(half, settings, tmp_path, dtypes, changes):
    compress(str(half[0]), tmp_path / "out", settings(device="cpu", **changes))
    assert dtypes == {torch.float32}
    for export in ("rocket", "dense"):
        stored = load_file(tmp_path / "out" / export / "model.safetensors")
        assert {tensor.dtype for tensor in stored.values()} <= {dtype_of(half[0]), torch.uint8}


def test_results_equal_those_of_the_same_numbers_in_float32(half, settings, tmp_path):
    for folder, name in zip(half, ("half", "single"), strict=True):
        compress(
            str(folder), tmp_path / name, settings(device="cpu", dtype=str(dtype_of(half[0])).removeprefix("torch."))
        )
    one, other = (load_file(tmp_path / name / "rocket" / "model.safetensors") for name in ("half", "single"))
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_states_of_bfloat16_models_are_held_in_bfloat16(half, settings, tmp_path, monkeypatch):
    held = []
    rounded = HeldStates._rounded
    monkeypatch.setattr(HeldStates, "_rounded", lambda self, tensor: held.append(rounded(self, tensor)) or held[-1])
    compress(str(half[0]), tmp_path / "out", settings(device="cpu"))
    # Hidden states of some models exceed the range of float16.
    expected = {(torch.bfloat16, torch.float32)} if dtype_of(half[0]) == torch.bfloat16 else set()
    assert {(tensor.dtype, computed) for tensor, computed in held} == expected


def test_held_states_change_errors_by_less_than_a_hundredth(half, settings, tmp_path, monkeypatch):
    errors = {}
    for name in ("held", "computed"):
        if name == "computed":
            monkeypatch.setattr(Run, "held_dtype", None)
        report = compress(str(half[0]), tmp_path / name, settings(device="cpu"))
        errors[name] = [layer.achieved_error for layer in report.layers]
    assert errors["held"] == pytest.approx(errors["computed"], rel=0.01)


@pytest.mark.parametrize("multiplies", [False, True])
def test_half_precision_is_evaluated_in_float32(half, dtypes, text, monkeypatch, multiplies):
    monkeypatch.setattr(devices, "multiplies_bfloat16", lambda: multiplies)
    result = evaluate_text(half[0], text, sequence_length=16, limit=4, device="cpu")
    assert dtypes == {torch.float32}
    assert result.dtype == "float32"


@pytest.mark.parametrize(("dtype", "expected"), [(torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)])
def test_a_cpu_that_multiplies_bfloat16_computes_in_it(monkeypatch, dtype, expected):
    monkeypatch.setattr(devices, "multiplies_bfloat16", lambda: True)
    assert devices.compute_dtype(dtype, torch.device("cpu")) == expected


def test_models_are_compared_in_float32(monkeypatch, half, settings, tmp_path, dtypes):
    monkeypatch.setattr(devices, "multiplies_bfloat16", lambda: True)
    compared, complete = [], SequentialCompression.complete

    def watched(self):
        dtypes.clear()
        complete(self)
        compared.append(set(dtypes))

    monkeypatch.setattr(SequentialCompression, "complete", watched)
    compress(str(half[0]), tmp_path / "out", settings(device="cpu", sequential=True))
    assert compared == [{torch.float32}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_accelerators_compute_in_the_stored_dtype(dtype):
    assert devices.compute_dtype(dtype, torch.device("cuda")) == dtype


def test_capabilities_of_this_cpu_are_known():
    # Renamed keys would be taken for missing instructions.
    known = torch.cpu.get_capabilities()
    assert {"amx_bf16", "avx512_bf16"} <= known.keys() or "bf16" in known
