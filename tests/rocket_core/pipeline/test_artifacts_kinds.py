"""Artifacts of every kind of layer, written from factors that a work folder holds."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rocket_core.calibration.samples import CalibrationInputs
from rocket_core.checkpoint import find_model
from rocket_core.hf import attach_factors
from rocket_core.layers.code_stream import coded_bytes
from rocket_core.linalg.integer_codes import RoundedWeight
from rocket_core.pipeline.preflight import prepare_run
from rocket_core.pipeline.stages.compress import AchievedErrors, save
from rocket_core.pipeline.stages.export import write_export
from rocket_core.pipeline.stages.units import CompressionUnit
from rocket_core.pipeline.state.records import RunIdentity
from rocket_core.pipeline.state.work_folder import WorkFolder
from rocket_core.report.schema import LayerReport
from rocket_core.sizes import budget
from tests.reference.factored_models import (
    INPUT_IDS,
    coded_values,
    load_unpacked,
    logits,
    mixed_factors,
    quantized_factors,
)
from tests.reference.sensitivity import silent_monitor

FAMILIES = ("llama", "gpt2", "opt")
CASES = [(family, make) for make in (mixed_factors, quantized_factors, coded_values) for family in FAMILIES]
PARTS = ("weight", "weight_mask", "weight_scale", "weight_u", "weight_u_scale")


def kind_of(factors):
    if factors is None:
        return "dense"
    if isinstance(factors, RoundedWeight):
        return "entropy_coded" if factors.entropy_coded else "quantized"
    if factors.dictionary is None:
        return "sparse"
    return "low_rank" if factors.support is None else "factored"


def coded_values_bytes(d_in, d_out, rank, nnz, factors):
    """Return the bytes of codes in groups of 32 with scales of 8 bits, of the mask, and of own atoms."""
    bits = factors.value_codes[0].scales.format.bits
    size = budget.quantized_bytes(nnz, 1, bits, 32, 8)
    if rank is None or nnz < rank * d_out:
        size += budget.mask_bytes(d_in if rank is None else rank, d_out)
    if rank is not None and factors.dictionary_owner is None:
        size += budget.quantized_bytes(rank, d_in, bits, 32, 8)
    return size


def bytes_of(kind, layer, factors):
    """Return the bytes of a layer, by the formulas."""
    if isinstance(factors, RoundedWeight):
        layout = factors.scales.format
        if factors.entropy_coded:
            return coded_bytes(factors.codes) + layout.scale_bytes(*factors.shape)
        return budget.quantized_bytes(*factors.shape, layout.bits, layout.group_size, layout.scale_bits)
    d_in, d_out, rank, nnz = layer["d_in"], layer["d_out"], layer["rank"], layer["nnz"]
    if kind == "dense":
        return budget.dense_bytes(d_in, d_out, 4)
    if factors.value_codes:
        return coded_values_bytes(d_in, d_out, rank, nnz, factors)
    if kind == "sparse":
        return budget.sparse_bytes(d_in, d_out, nnz, 4)
    if layer["dictionary"] in (None, layer["name"]):
        return budget.factored_bytes(d_in, d_out, rank, nnz, 4)
    return budget.coefficient_bytes(d_out, rank, nnz, 4)


def report_of(name, shape, input_group, factors):
    """Return a layer's report; owners of shared dictionaries name themselves as the dictionary's layer, or none."""
    kind, (d_in, d_out) = kind_of(factors), shape
    layer = {"name": name, "d_in": d_in, "d_out": d_out, "rank": None, "nnz": None, "dictionary": None}
    if factors is not None and not isinstance(factors, RoundedWeight):
        support = factors.support
        layer["nnz"] = factors.coefficients.numel() if support is None else int(support.sum())
        layer["dictionary"] = factors.dictionary_owner or (name if "0" in name else None)
        if factors.dictionary is None:
            layer["dictionary"] = None
        else:
            layer["rank"] = factors.dictionary.shape[1]
    return LayerReport(
        **layer,
        kind=kind,
        stored_bytes=bytes_of(kind, layer, factors),
        input_group=input_group,
        # These do not affect what is written.
        sparsity=None,
        rank_nnz_ratio=None,
        kept_parameters=0,
        compression_ratio=0.0,
        reconstruction_error=0.0,
        weight_error=0.0,
    )


@pytest.fixture(scope="module")
def exported(tmp_path_factory, model_folder, settings):
    """Return for each family the folders of both artifacts, the factors, and the reports of the layers."""
    made = {}

    def make(family, make_factors):
        if (family, make_factors) not in made:
            run = prepare_run(find_model(str(model_folder(family))), settings())
            work = WorkFolder(tmp_path_factory.mktemp("exported") / family)
            nothing = CalibrationInputs.of_text(torch.zeros(1, 1, dtype=torch.int64))
            work.claim(RunIdentity(rocket_version="1", model="m", revision="r", settings={}), nothing)
            factors, outcomes = make_factors(run.architecture.model), {}
            for name, one in factors.items():
                unit = CompressionUnit(names=(name,), input_group=name, candidates=())
                ones = torch.ones(one.shape[1], dtype=torch.float64)
                save(run, work, unit, one, AchievedErrors(errors=ones, energies=4 * ones))
                outcomes[name] = work.outcome(name)
            layers = {
                name: report_of(name, run.architecture.shape(name), name, factors.get(name))
                for block in run.layers
                for name in block
            }
            monitor = silent_monitor(run)
            with monitor.stage("exporting"):
                folders = {kind: write_export(run, work, kind, layers, monitor) for kind in ("rocket", "dense")}
            names = {name: run.disk_name(name) for name in layers}
            work.release()
            made[family, make_factors] = folders, factors, layers, names, outcomes
        return made[family, make_factors]

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_all_kinds_are_present(family, exported):
    _, _, layers, _, _ = exported(family, mixed_factors)
    kinds = {layer.kind for layer in layers.values()}
    assert kinds >= {"dense", "sparse", "factored"}
    assert ("low_rank" in kinds) is (family != "gpt2")
    followers = [layer for layer in layers.values() if layer.dictionary not in (None, layer.name)]
    assert bool(followers) is (family != "gpt2")


@pytest.mark.parametrize(("family", "make_factors"), CASES)
class TestEveryKind:
    def test_it_computes_what_the_factors_do_in_memory(self, family, make_factors, exported, model_folder):
        folders, factors, *_ = exported(family, make_factors)
        in_memory = attach_factors(AutoModelForCausalLM.from_pretrained(model_folder(family)), factors)
        assert torch.equal(logits(load_unpacked(folders["rocket"])), logits(in_memory))

    def test_files_equal_those_written_by_saving(self, family, make_factors, exported, model_folder, tmp_path):
        folders, factors, *_ = exported(family, make_factors)
        attach_factors(AutoModelForCausalLM.from_pretrained(model_folder(family)), factors).save_pretrained(tmp_path)
        written, saved = (load_file(folder / "model.safetensors") for folder in (folders["rocket"], tmp_path))
        assert written.keys() == saved.keys()
        assert all(torch.equal(written[key], saved[key]) for key in written)
        written, saved = (json.loads((folder / "config.json").read_text()) for folder in (folders["rocket"], tmp_path))
        assert written["quantization_config"] == saved["quantization_config"]
        assert written["quantization_config"]["format_version"] == (2 if make_factors is mixed_factors else 3)

    def test_the_dense_export_is_the_dequantized_model(self, family, make_factors, exported):
        folders, *_ = exported(family, make_factors)
        dense = AutoModelForCausalLM.from_pretrained(folders["dense"])
        dequantized = AutoModelForCausalLM.from_pretrained(folders["rocket"]).dequantize()
        assert dense.state_dict().keys() == dequantized.state_dict().keys()
        for key, value in dense.state_dict().items():
            assert torch.equal(value, dequantized.state_dict()[key]), key
        assert torch.isfinite(dense(INPUT_IDS).logits).all()

    def test_the_bytes_formula_equals_the_written_bytes(self, family, make_factors, exported):
        folders, _, layers, names, _ = exported(family, make_factors)
        tensors = load_file(folders["rocket"] / "model.safetensors")
        for name, layer in layers.items():
            parts = (f"{names[name]}.{part}" for part in PARTS)
            assert layer.stored_bytes == sum(tensors[key].nbytes for key in parts if key in tensors), name

    def test_the_outcome_counts_what_is_stored(self, family, make_factors, exported):
        _, factors, layers, _, outcomes = exported(family, make_factors)
        assert outcomes.keys() == factors.keys()
        for name, outcome in outcomes.items():
            assert (outcome.stored_bytes, outcome.achieved_error) == (layers[name].stored_bytes, 0.5)
            if isinstance(factors[name], RoundedWeight):
                numbers = layers[name].d_in * layers[name].d_out
                assert (outcome.nnz, outcome.kept_parameters) == (numbers, numbers)
            else:
                assert outcome.nnz == layers[name].nnz
