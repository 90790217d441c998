"""Sensitivities of models other than text decoders, compared with the whole model in memory."""

import itertools

import pytest
import torch

from rocket_core.calibration.samples import CalibrationInputs
from rocket_core.checkpoint import find_model
from rocket_core.pipeline.preflight import prepare_run
from rocket_core.pipeline.stages import sensitivity
from rocket_core.pipeline.stages.sensitivity import measure_sensitivities
from tests.reference.sensitivity import assert_close, die_at, jacobian_energy, silent_monitor, squared_gradients
from tests.reference.tiny_models import ALL_FAMILIES, save_tiny_model, tiny_inputs
from tests.sampling import sweep

ENCODER_DECODERS = ["t5", "whisper"]


@pytest.fixture
def prepare(tmp_path, settings):
    """Return a model of a family in float64, and its run."""

    def make(family, *, dtype=torch.float64, **changes):
        folder = save_tiny_model(family, tmp_path / "model")
        model = ALL_FAMILIES[family]().to(dtype)
        model.save_pretrained(folder)
        data = {} if model.main_input_name == "input_ids" else {"calibration": {"dataset": "synthetic"}}
        return model, prepare_run(find_model(str(folder)), settings(precision="float64", **data, **changes))

    return make


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    """Limit positions per batch so that there are several batches."""
    monkeypatch.setattr(sensitivity, "TOKENS_PER_GRADIENT_BATCH", 150)


def given(model, samples=5):
    tensors = tiny_inputs(model, samples)
    return tensors, CalibrationInputs(tensors=tensors)


def like(model, batch):
    return {name: tensor.to(model.dtype) if tensor.is_floating_point() else tensor for name, tensor in batch.items()}


@pytest.mark.parametrize("family", ENCODER_DECODERS)
@pytest.mark.parametrize("ignore", [(), ("*encoder.*.0.*",), ("*encoder.*",)], ids=["all", "some", "decoder"])
def test_encoder_decoders_equal_one_backward_pass(family, ignore, prepare, open_work):
    model, run = prepare(family, ignore=ignore)
    batch, inputs = given(model)
    found = measure_sensitivities(run, inputs, open_work(run, inputs), silent_monitor(run))
    assert any("encoder.block.1" in name or "encoder.layers.1" in name for name in found) == (ignore != ("*encoder.*",))
    assert_close(found, squared_gradients(model, found, like(model, batch)), within=1e-6)


@pytest.mark.parametrize("family", ENCODER_DECODERS)
def test_embeddings_of_both_sides_equal_one_backward_pass(family, prepare, open_work):
    unweighted = {"token_weights": "none"}
    model, run = prepare(family, ratio=None, target_bytes=10**6, preset="fast", **unweighted)
    [table] = run.tables
    batch, inputs = given(model)
    found = measure_sensitivities(run, inputs, open_work(run, inputs), silent_monitor(run))
    if family == "t5":
        assert table.modules == ("shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head")
        assert not found.pop("shared").fisher_diagonal.any()  # never called by this name
    else:
        assert table.modules == ("model.decoder.embed_tokens", "proj_out")
    assert found.keys() >= {*table.modules} - {"shared"}
    assert_close(found, squared_gradients(model.requires_grad_(), found, like(model, batch)), within=1e-6)


@pytest.mark.parametrize("family", ENCODER_DECODERS)
def test_half_precision_comes_close(family, prepare, open_work):
    model, run = prepare(family, dtype=torch.float16)
    batch, inputs = given(model)
    found = measure_sensitivities(run, inputs, open_work(run, inputs), silent_monitor(run))
    model.double()
    assert_close(found, squared_gradients(model, found, like(model, batch)), within=0.02)


@pytest.mark.parametrize("family", sweep(["vit"], soak=["siglip_vision", "roberta", "distilbert"]))
def test_without_a_loss_it_measures_the_final_hidden_states(family, prepare, open_work):
    # Including models with a head for masked tokens: they see the tokens that a decoder would predict.
    model, run = prepare(family, ignore=("*.0.*",))
    batch = {name: tensor[:1] for name, tensor in tiny_inputs(model, 1, length=8).items()}
    # Each repetition draws different signs.
    many = {name: tensor.expand(800, *tensor.shape[1:]) for name, tensor in batch.items()}
    inputs = CalibrationInputs(tensors=many)
    found = measure_sensitivities(run, inputs, open_work(run, inputs), silent_monitor(run), windows=800)
    assert_close(found, jacobian_energy(model, found, like(model, batch)), within=0.08)


def test_killed_within_the_encoder_it_resumes_to_the_same_bytes(prepare, open_work, monkeypatch):
    model, run = prepare("t5", dtype=torch.float32)
    _, inputs = given(model)

    def measured(work):
        measure_sensitivities(run, inputs, work, silent_monitor(run))
        return {file.name: file.read_bytes() for file in (work.path / "sensitivities").iterdir()}

    expected = measured(open_work(run, inputs, "whole"))
    for number in range(4):
        work = open_work(run, inputs, str(number))
        with monkeypatch.context() as patch:
            die_at(patch, number, late=False)
            with pytest.raises(KeyboardInterrupt):
                measured(work)
        assert measured(work) == expected


@pytest.mark.parametrize("step", sweep([7], soak=[1]))
@pytest.mark.parametrize(
    "target", [{}, {"ratio": None, "target_bytes": 10**6, "preset": "fast"}], ids=["layers", "all"]
)
def test_a_killed_encoder_decoder_resumes_to_the_same_bytes(prepare, open_work, monkeypatch, step, target):
    model, run = prepare("t5", dtype=torch.float32, ignore=("*.SelfAttention.*", "*.DenseReluDense.wi*"), **target)
    _, inputs = given(model)

    def measured(work):
        measure_sensitivities(run, inputs, work, silent_monitor(run))
        return {file.name: file.read_bytes() for file in (work.path / "sensitivities").iterdir()}

    expected = measured(open_work(run, inputs, "whole"))
    for number in itertools.count(step=step):
        work = open_work(run, inputs, str(number))
        with monkeypatch.context() as patch:
            operations = die_at(patch, number, late=number % 2 == 1)
            try:
                measured(work)
            except KeyboardInterrupt:
                pass
            else:
                assert number >= next(operations) > 20
                return
        assert measured(work) == expected
