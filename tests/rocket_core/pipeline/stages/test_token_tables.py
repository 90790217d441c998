"""Statistics and predictions of token tables, compared with the whole model in memory."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from rocket_core.calibration.samples import CalibrationInputs
from rocket_core.checkpoint import find_model
from rocket_core.methods import quantized
from rocket_core.pipeline.block_walk import BlockWalk
from rocket_core.pipeline.preflight import prepare_run
from rocket_core.pipeline.stages import token_tables
from rocket_core.pipeline.stages.sensitivity import measure_sensitivities
from rocket_core.sizes.code_format import CodeFormat
from tests.reference.sensitivity import silent_monitor, squared_gradients
from tests.reference.tiny_models import FAMILIES, VOCAB_SIZE, byte_tokenizer

TOKENS = torch.randint(3, 259, (4, 20), generator=torch.Generator().manual_seed(5))


@pytest.fixture
def prepared(tmp_path, settings, open_work):
    """Return the run, its work folder with sensitivities, and the model of a family, with a tied head or not."""

    def make(*, tied, **changes):
        config = LlamaConfig(**FAMILIES["llama"]().config.to_dict() | {"tie_word_embeddings": tied})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = LlamaForCausalLM(config).eval()
        model.save_pretrained(tmp_path / "model")
        byte_tokenizer().save_pretrained(tmp_path / "model")
        settled = settings(
            **{"ratio": None, "target_bytes": 10**6, "preset": "fast", "precision": "float64", "token_weights": "none"}
            | changes
        )
        run = prepare_run(find_model(str(tmp_path / "model")), settled)
        inputs = CalibrationInputs.of_text(TOKENS)
        work = open_work(run, inputs)
        measure_sensitivities(run, inputs, work, silent_monitor(run), windows=len(TOKENS))
        return run, work, inputs, AutoModelForCausalLM.from_pretrained(tmp_path / "model")

    return make


def head_inputs(model):
    """Return what the head reads, in float64."""
    rows = []
    handle = model.lm_head.register_forward_pre_hook(lambda _module, args: rows.append(args[0]))
    with torch.no_grad():
        model(TOKENS)
    handle.remove()
    return rows[0].flatten(0, 1).double()


@pytest.mark.parametrize("tied", [False, True])
class TestStatistics:
    def test_sensitivities_are_those_of_the_whole_model(self, prepared, tied):
        _, work, _, model = prepared(tied=tied)
        expected = squared_gradients(with_gradients(model), ["model.embed_tokens", "lm_head"], TOKENS)
        for name, values in expected.items():
            found = work.sensitivity(name).fisher_diagonal
            torch.testing.assert_close(found, values, rtol=1e-4, atol=1e-4 * float(values.mean()))

    def test_predicted_loss_is_that_of_the_second_order(self, prepared, tied):
        run, work, inputs, model = prepared(tied=tied, shrinkage=0.0)
        expected = squared_gradients(with_gradients(model), ["model.embed_tokens", "lm_head"], TOKENS)
        rows = head_inputs(model)
        code_format = CodeFormat(bits=4, group_size=16, scale_bits=6)
        for table in run.tables:
            walk = BlockWalk(run, inputs, lambda: None)
            problem = token_tables._problem(run, work, table, token_tables._statistics(run, walk, work, table, inputs))
            result = quantized.compress(problem, code_format, splitting=False)
            error = (problem.weight.double() - result.factors.weight(torch.float64)).T
            predicted = problem.predicted_loss_increase(float(result.errors.sum()))
            floored = {name: torch.clamp_min(value, 1e-4 * value.mean()) for name, value in expected.items()}
            loss = 0.0
            if table.head is not None:
                loss += 0.5 * float((floored["lm_head"] * (rows @ error.T).square().mean(dim=0)).sum())
            if table.embedding is not None:
                logits = floored["lm_head"] if tied else torch.ones(VOCAB_SIZE, dtype=torch.float64)
                frequencies = logits / logits.sum()
                loss += 0.5 * float(frequencies @ (error.square() @ floored["model.embed_tokens"]))
            assert predicted == pytest.approx(loss, rel=1e-3)

    def test_more_bits_err_less_and_the_sample_is_fair(self, prepared, tied):
        run, work, inputs, _ = prepared(tied=tied)
        for table in run.tables:
            profile = token_tables.profile_table(run, BlockWalk(run, inputs, lambda: None), work, table, inputs)
            assert (profile.d_in, profile.d_out, profile.input_group) == (32, VOCAB_SIZE, table.name)
            by_bits = {one.bits: one for one in profile.candidates if (one.group_size, one.scale_bits) == (16, 6)}
            losses = [by_bits[bits].loss for bits in (2, 3, 4, 5, 6, 7, 8)]
            assert losses == sorted(losses, reverse=True)
            assert profile.candidates[0].stored_bytes == 4 * 32 * VOCAB_SIZE
            stored = token_tables._stored_statistics(run, work, table.name)
            problem = token_tables._problem(run, work, table, stored)
            result = quantized.compress(problem, by_bits[4].code_format, splitting=False)
            assert math.sqrt(float(result.errors.sum())) > 0
            predicted = problem.predicted_loss_increase(float(result.errors.sum()))
            assert 0.6 * by_bits[4].loss < predicted < 1.1 * by_bits[4].loss


def with_gradients(model):
    """Return the model with the embedding's output in the graph of autograd."""
    return model.requires_grad_()


def test_an_embedding_that_is_never_called_is_left_alone(prepared, monkeypatch):
    run, work, inputs, _ = prepared(tied=False)
    forward = LlamaForCausalLM.forward

    def look_up(self, input_ids=None, **kwargs):
        kwargs["inputs_embeds"] = torch.nn.functional.embedding(input_ids, self.model.embed_tokens.weight)
        return forward(self, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", look_up)
    for name in ("model.embed_tokens", "lm_head"):
        (work.path / "sensitivities" / f"{name}.safetensors").unlink()
    measure_sensitivities(run, inputs, work, silent_monitor(run), windows=len(TOKENS))
    table = run.tables[0]
    assert token_tables.profile_table(run, BlockWalk(run, inputs, lambda: None), work, table, inputs) is None
