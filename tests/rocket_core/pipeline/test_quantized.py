"""Compression to bytes, for which layers become integer codes."""

import functools
import itertools

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import rocket_core.hf  # noqa: F401  # registers the quantizer
from rocket_core.candidates import CODE_KINDS
from rocket_core.config import KINDS
from rocket_core.errors import CompressionCancelledError, InfeasibleBudgetError
from rocket_core.evaluation import evaluate_text
from rocket_core.pipeline import compress
from tests.reference.observers import Watch
from tests.sampling import sweep

RATIO = 0.8
BYTES = {"budget": "bytes", "preset": "fast", "kinds": KINDS}
CHOICES = {
    "static": {"sequential": False, "storage": "memory"},
    "sequential": {"sequential": True, "storage": "memory"},
    "sequential, entropy coded": {"sequential": True, "kinds": ("sparse", "entropy_coded")},
}


@pytest.fixture(scope="module")
def quantizing(settings):
    """Return settings that count bytes."""

    def make(choice, **changes):
        return settings(**{**BYTES, **CHOICES[choice], **changes})

    return make


@pytest.fixture(scope="module")
def quantized(tmp_path_factory, model_folder, quantizing):
    """Return the output folder and the report of a run, each made once."""

    @functools.cache
    def make(choice, family):
        output = tmp_path_factory.mktemp("quantized") / "out"
        return output, compress(str(model_folder(family)), output, quantizing(choice, ratio=RATIO))

    return make


KEPT = [("static", "gpt2"), ("sequential", "bert"), ("sequential, entropy coded", "llama")]
CASES = itertools.product(CHOICES, ["llama", "gpt2", "bert", "t5"])


@pytest.mark.parametrize(("choice", "family"), sweep(KEPT, soak=[case for case in CASES if case not in KEPT]))
def test_the_budget_is_kept_and_the_artifact_loads(quantized, choice, family):
    output, report = quantized(choice, family)
    kinds = {layer.kind for layer in report.layers}
    assert kinds & CODE_KINDS
    dense = sum(4 * layer.d_in * layer.d_out for layer in report.layers)
    stored = sum(layer.stored_bytes for layer in report.layers)
    assert 0.18 * dense <= stored <= (1 - RATIO) * dense
    assert report.bits_per_weight == pytest.approx(32 * stored / dense)
    assert f"in {32 * stored / dense:.2f} bits per weight" in (output / "rocket" / "README.md").read_text()
    for layer in report.layers:
        assert layer.bits_per_weight == pytest.approx(8 * layer.stored_bytes / (layer.d_in * layer.d_out))
        assert layer.kind != "quantized" or layer.bits is not None
        assert layer.bits is None or layer.kind in {"quantized", "low_rank"}
        assert layer.kind not in CODE_KINDS or (layer.nnz, layer.rank, layer.sparsity) == (None, None, None)
    files = load_file(output / "rocket" / "model.safetensors")
    scales = [name for name in files if name.endswith(".weight_scale")]
    coded = [layer for layer in report.layers if layer.kind in CODE_KINDS or layer.bits is not None]
    assert len(scales) == len(coded)


@pytest.mark.parametrize("choice", sweep(["sequential, entropy coded"], soak=["static", "sequential"]))
def test_both_exports_compute_the_same(quantized, choice):
    output, _ = quantized(choice, "llama")
    tokens = torch.arange(24)[None] % 300
    factored, dense = (AutoModelForCausalLM.from_pretrained(output / export) for export in ("rocket", "dense"))
    with torch.no_grad():
        torch.testing.assert_close(factored(tokens).logits, dense(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("choice", sweep(["sequential, entropy coded"], soak=["static", "sequential"]))
def test_a_cancelled_run_resumes_to_the_same_bytes(model_folder, quantizing, quantized, choice, tmp_path):
    (whole, _), parts = quantized(choice, "llama"), tmp_path / "parts"

    class Stop:
        """Cancels at the n-th question."""

        def __init__(self, after):
            self.left = after

        def __call__(self):
            self.left -= 1
            return self.left < 0

    cancelled = 0
    for after in (5, 30, 60, 90, 10**9):
        try:
            config = quantizing(choice, ratio=RATIO)
            compress(str(model_folder("llama")), parts, config, observer=Watch(should_cancel=Stop(after)), resume=True)
        except CompressionCancelledError:
            cancelled += 1
    assert cancelled >= 2
    for export in ("rocket", "dense"):
        name = f"{export}/model.safetensors"
        assert (parts / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize("choice", sweep(["static"], soak=["sequential", "sequential, entropy coded"]))
def test_a_size_below_that_of_two_bits_is_refused(model_folder, quantizing, choice, tmp_path):
    with pytest.raises(InfeasibleBudgetError) as refusal:
        compress(str(model_folder("llama")), tmp_path / "out", quantizing(choice, ratio=0.97))
    nearest = refusal.value.nearest_ratio
    assert 0.9 < nearest < 0.97
    report = compress(str(model_folder("llama")), tmp_path / "out", quantizing(choice, ratio=nearest))
    dense = sum(4 * layer.d_in * layer.d_out for layer in report.layers)
    assert sum(layer.stored_bytes for layer in report.layers) <= (1 - nearest) * dense


@pytest.mark.soak
def test_at_equal_bytes_quantized_models_lose_less(model_folder, settings, text, tmp_path):
    losses = {}
    for kinds in (BYTES["kinds"], ("low_rank", "factored", "shared", "sparse")):
        compress(str(model_folder("llama")), tmp_path / str(kinds), settings(**BYTES | {"kinds": kinds, "ratio": 0.6}))
        found = evaluate_text(tmp_path / str(kinds) / "rocket", text, sequence_length=32, limit=8, device="cpu")
        losses[kinds] = found.negative_log_likelihood
    dense = evaluate_text(model_folder("llama"), text, sequence_length=32, limit=8, device="cpu")
    quantized, others = (abs(loss - dense.negative_log_likelihood) for loss in losses.values())
    assert quantized < 0.5 * others
