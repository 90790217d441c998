"""Encoder-decoders whose size can only be reached by quantizing the table that encoder, decoder and head share."""

import functools
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from rocket_core.checkpoint import find_model
from rocket_core.errors import CompressionCancelledError, RocketError
from rocket_core.hf import attach_factors
from rocket_core.layers import QuantizedEmbedding
from rocket_core.linalg.integer_codes import search_scales
from rocket_core.linalg.rounding import round_to_nearest
from rocket_core.pipeline import compress
from rocket_core.pipeline.preflight import prepare_run
from rocket_core.sizes.code_format import CodeFormat
from tests.reference.factored_models import block_linears
from tests.reference.observers import Watch
from tests.reference.sequence_models import (
    build_sequence_model,
    inputs_of,
    load_sequence_model,
    sequence_logits,
)
from tests.reference.tiny_models import byte_tokenizer
from tests.sampling import sweep

TABLES = {
    "t5": ("shared",),
    "mt5": ("shared", "lm_head"),
    "bart": ("model.shared",),
    "whisper": ("model.decoder.embed_tokens",),
}
PART = 0.45


def size_of(folder):
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@pytest.fixture(scope="module")
def dense_folder(tmp_path_factory, model_folder):
    """Return a function that returns the checkpoint of a family."""

    @functools.cache
    def make(family):
        folder = tmp_path_factory.mktemp("dense") / family
        if family == "whisper":
            shutil.copytree(model_folder(family), folder)
        else:
            byte_tokenizer().save_pretrained(folder)
        build_sequence_model(family).half().save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="module")
def within(tmp_path_factory, dense_folder, settings):
    """Return a function that compresses a family to a part of its size; it returns the output folder and the report."""

    @functools.cache
    def make(family, part=PART, **changes):
        folder = dense_folder(family)
        synthetic = {"calibration": {"dataset": "synthetic", "samples": 8, "sequence_length": 32}}
        own = synthetic if family == "whisper" else {}
        bytes_of = {"ratio": None, "target_bytes": round(part * size_of(folder)), "preset": "fast"}
        output = tmp_path_factory.mktemp("within") / family
        config = settings(**(bytes_of | {"sensitivity_samples": 4} | own | changes))
        return output, compress(str(folder), output, config)

    return make


@pytest.mark.parametrize("family", TABLES)
def test_a_size_below_the_table_is_reached(family, within, dense_folder):
    output, report = within(family)
    size = PART * size_of(dense_folder(family))
    assert report.tables == TABLES[family]
    assert not report.skipped
    assert 0.9 * size < size_of(output / "rocket") <= size
    loaded = load_sequence_model(output / "rocket")
    assert type(loaded.get_submodule(TABLES[family][0])) is QuantizedEmbedding


@pytest.mark.parametrize("keep_packed", [None, True, False])
@pytest.mark.parametrize("family", TABLES)
def test_outputs_are_those_of_the_dense_export(family, keep_packed, within):
    output, _ = within(family)
    config = AutoConfig.from_pretrained(output / "rocket")
    config.quantization_config["keep_packed"] = keep_packed
    loaded = load_sequence_model(output / "rocket", dtype=torch.float32, config=config)
    dense = load_sequence_model(output / "dense", dtype=torch.float32)
    expected = sequence_logits(dense, family)
    if keep_packed and family in ("t5", "mt5"):
        with pytest.raises(RocketError, match="load the model without keep_packed"):
            sequence_logits(loaded, family)
    else:
        torch.testing.assert_close(sequence_logits(loaded, family), expected, rtol=1e-2, atol=1e-2)
        options = {"max_new_tokens": 6, "do_sample": False, "use_cache": False}
        assert torch.equal(*(model.generate(**inputs_of(family), **options) for model in (loaded, dense)))
    torch.testing.assert_close(sequence_logits(loaded.dequantize(), family), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("sequential", [False, True])
def test_a_cancelled_run_resumes_to_the_same_bytes(sequential, within, dense_folder, settings, tmp_path):
    whole, _ = within("bart", sequential=sequential)
    size = round(PART * size_of(dense_folder("bart")))
    how = {"target_bytes": size, "preset": "fast", "sensitivity_samples": 4, "sequential": sequential}
    config = settings(ratio=None, **how)
    cancelled = 0
    for after in (3, 25, 40, 55, 70, 85, 10**9):
        left = iter(range(after))
        try:
            compress(
                str(dense_folder("bart")),
                tmp_path / "parts",
                config,
                observer=Watch(should_cancel=lambda left=left: next(left, None) is None),
                resume=True,
            )
        except CompressionCancelledError:
            cancelled += 1
    assert cancelled >= 4
    name = "rocket/model.safetensors"
    assert (tmp_path / "parts" / name).read_bytes() == (whole / name).read_bytes()


def test_a_table_that_is_stored_twice_stays_dense(dense_folder, settings, tmp_path):
    folder = shutil.copytree(dense_folder("bart"), tmp_path / "bart")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.encoder.embed_tokens.weight"] = tensors["model.shared.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    run = prepare_run(find_model(str(folder)), settings(ratio=None, target_bytes=size_of(folder), preset="fast"))
    assert run.tables == ()
    assert run.skipped == {"model.shared": "stored twice in the checkpoint"}


@pytest.mark.parametrize(("family", "bits"), sweep([("t5", 3), ("bart", 4)], soak=[("t5", 4), ("bart", 3)]))
def test_it_diverges_less_than_uniform_bits_at_equal_bytes(family, bits, dense_folder, settings, text, tmp_path):
    original = load_sequence_model(dense_folder(family), dtype=torch.float32)
    uniform = load_sequence_model(dense_folder(family), dtype=torch.float16)
    weights = {name: module.weight.detach().float().T for name, module in block_linears(uniform).items()}
    weights[TABLES[family][0]] = uniform.get_input_embeddings().weight.detach().float().T
    code_format = CodeFormat(bits=bits, group_size=16, scale_bits=8)
    attach_factors(
        uniform,
        {
            name: round_to_nearest(weight, search_scales(weight, torch.ones(len(weight)), code_format))
            for name, weight in weights.items()
        },
    )
    uniform.save_pretrained(tmp_path / "uniform")
    size = size_of(tmp_path / "uniform")
    config = settings(ratio=None, target_bytes=size, preset="fast", sensitivity_samples=12)
    report = compress(str(dense_folder(family)), tmp_path / "out", config)
    assert report.tables == TABLES[family]
    assert size_of(tmp_path / "out" / "rocket") <= size
    found = load_sequence_model(tmp_path / "out" / "rocket", dtype=torch.float32)
    rounded = load_sequence_model(tmp_path / "uniform", dtype=torch.float32)
    ours, other = (divergence(original, model, text) for model in (found, rounded))
    assert ours < 0.6 * other


@pytest.mark.parametrize("family", ["switch", "nllb-moe"])
def test_experts_in_lists_are_compressed_for_the_same_tokens(family, dense_folder, settings, tmp_path):
    folder = dense_folder(family)
    report = compress(str(folder), tmp_path / "out", settings(preset="best", ratio=0.4, sensitivity_samples=8))
    experts = [layer for layer in report.layers if ".experts." in layer.name]
    assert len(experts) + sum(".experts." in name for name in report.skipped) == sum(
        ".experts." in name for name in block_linears(load_sequence_model(folder))
    )
    assert {layer.kind for layer in experts} != {"dense"}
    assert not any("router" in name for name in (*report.skipped, *(layer.name for layer in report.layers)))
    # With rows of other tokens, targets would be far from the weights.
    assert all(layer.achieved_error < 2 * layer.reconstruction_error + 0.05 for layer in experts)
    found = load_sequence_model(tmp_path / "out" / "rocket", dtype=torch.float32)
    dense = load_sequence_model(tmp_path / "out" / "dense", dtype=torch.float32)
    expected = sequence_logits(dense, family)
    torch.testing.assert_close(sequence_logits(found, family), expected, rtol=1e-2, atol=1e-2)


def test_blocks_that_look_at_weights_are_refined(dense_folder, settings, tmp_path):
    family = "t5"
    how = {"preset": "max", "budget": "bytes", "ratio": 0.7, "sensitivity_samples": 4}
    report = compress(str(dense_folder(family)), tmp_path / "out", settings(**how))
    assert report.refinement is not None
    found = load_sequence_model(tmp_path / "out" / "rocket", dtype=torch.float32)
    dense = load_sequence_model(tmp_path / "out" / "dense", dtype=torch.float32)
    expected = sequence_logits(dense, family)
    torch.testing.assert_close(sequence_logits(found, family), expected, rtol=1e-2, atol=1e-2)


def test_a_decoder_starts_with_the_token_that_generation_does(dense_folder, settings, tmp_path):
    folder = dense_folder("t5gemma")
    assert not hasattr(AutoConfig.from_pretrained(folder), "decoder_start_token_id")
    compress(str(folder), tmp_path / "out", settings(preset="fast", ratio=0.3))
    loaded = load_sequence_model(tmp_path / "out" / "rocket")
    assert loaded.generate(**inputs_of("t5gemma"), max_new_tokens=4).shape == (2, 5)


def divergence(original, model, text):
    """Return the mean KL divergence of a model's predictions from the original's for the end of a text, in nats."""
    ids = torch.tensor(byte_tokenizer()(text.read_text()).input_ids)
    first, second = ids[: len(ids) // 64 * 64].view(-1, 2, 32)[-40:].unbind(1)
    with torch.no_grad():
        rows = [one(input_ids=first, decoder_input_ids=second).logits.log_softmax(-1) for one in (original, model)]
    return float((rows[0].exp() * (rows[0] - rows[1])).sum(-1).mean())
