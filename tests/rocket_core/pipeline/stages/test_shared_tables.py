"""Predictions for tables that encoder, decoder and head share, compared with the whole model in memory."""

import pytest
import torch

from rocket_core.calibration.samples import CalibrationInputs
from rocket_core.checkpoint import find_model
from rocket_core.methods import quantized
from rocket_core.pipeline.block_walk import BlockWalk
from rocket_core.pipeline.preflight import prepare_run
from rocket_core.pipeline.stages import token_tables
from rocket_core.pipeline.stages.sensitivity import measure_sensitivities
from rocket_core.sizes.code_format import CodeFormat
from tests.reference.sensitivity import silent_monitor, squared_gradients
from tests.reference.sequence_models import build_sequence_model, sequence_batch
from tests.reference.tiny_models import byte_tokenizer

WITHIN = {"t5": "", "bart": "model."}


@pytest.fixture
def prepared(tmp_path, settings, open_work):
    """Return the run, its work folder with sensitivities, its inputs and the model of a family."""

    def make(family, **changes):
        model = build_sequence_model(family)
        if family == "bart":
            # Calibration leaves it at zero, as released models do.
            model.final_logits_bias.zero_()
        model.save_pretrained(tmp_path / family)
        byte_tokenizer().save_pretrained(tmp_path / family)
        settled = settings(
            **{
                "ratio": None,
                "target_bytes": 10**6,
                "preset": "fast",
                "precision": "float64",
                "shrinkage": 0.0,
                "token_weights": "none",
            }
            | changes
        )
        run = prepare_run(find_model(str(tmp_path / family)), settled)
        inputs = CalibrationInputs(tensors=sequence_batch())
        work = open_work(run, inputs)
        return run, work, inputs, model

    return make


def head_inputs(model):
    """Return what the head reads, in float64."""
    rows = []
    handle = model.lm_head.register_forward_pre_hook(lambda _module, args: rows.append(args[0]))
    with torch.no_grad():
        model(**sequence_batch())
    handle.remove()
    return rows[0].flatten(0, 1).double()


@pytest.mark.parametrize("family", WITHIN)
def test_predicted_loss_counts_every_use_of_the_table(family, prepared):
    run, work, inputs, model = prepared(family)
    measure_sensitivities(run, inputs, work, silent_monitor(run), windows=len(inputs))
    sides = [f"{WITHIN[family]}{side}.embed_tokens" for side in ("encoder", "decoder")]
    expected = squared_gradients(model.requires_grad_(), [*sides, "lm_head"], sequence_batch())
    floored = {name: torch.clamp_min(value, 1e-4 * value.mean()) for name, value in expected.items()}
    [table] = run.tables
    walk = BlockWalk(run, inputs, lambda: None)
    problem = token_tables._problem(run, work, table, token_tables._statistics(run, walk, work, table, inputs))
    result = quantized.compress(problem, CodeFormat(bits=4, group_size=16, scale_bits=6), splitting=False)
    error = (problem.weight.double() - result.factors.weight(torch.float64)).T
    loss = 0.5 * float((floored["lm_head"] * (head_inputs(model) @ error.T).square().mean(dim=0)).sum())
    frequencies = floored["lm_head"] / floored["lm_head"].sum()
    for side in sides:
        scale = getattr(model.get_submodule(side), "embed_scale", 1.0)
        loss += 0.5 * scale**2 * float(frequencies @ (error.square() @ floored[side]))
    assert problem.predicted_loss_increase(float(result.errors.sum())) == pytest.approx(loss, rel=1e-3)


@pytest.mark.parametrize("family", WITHIN)
def test_without_sensitivities_the_table_is_profiled_too(family, prepared):
    run, work, inputs, _ = prepared(family, objective="whitened")
    [table] = run.tables
    profile = token_tables.profile_table(run, BlockWalk(run, inputs, lambda: None), work, table, inputs)
    by_bits = {one.bits: one for one in profile.candidates if (one.group_size, one.scale_bits) == (16, 6)}
    errors = [by_bits[bits].reconstruction_error for bits in (2, 4, 6, 8)]
    assert errors == sorted(errors, reverse=True)
