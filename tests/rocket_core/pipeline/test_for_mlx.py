"""Models for MLX: a folder that mlx-lm reads, run here by mlx-lm where it is installed."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from rocket_core.config import compression_config
from rocket_core.engines import MLX
from rocket_core.errors import InfeasibleBudgetError, InvalidConfigError, UnsupportedArchitectureError
from rocket_core.evaluation import load_model, open_model
from rocket_core.inspection.checks.engine_limits import check_engine
from rocket_core.pipeline import compress
from rocket_core.sizes.block_types import BLOCK_FORMATS
from rocket_core.sizes.code_format import fewest_bytes

BUNDLED = Path("examples/tiny-llama")
SIZE = 1_600_000


@pytest.fixture(scope="module")
def result(tmp_path_factory, settings):
    output = tmp_path_factory.mktemp("out")
    chosen = settings(ratio=None, target_bytes=SIZE, preset="fast", sensitivity_samples=4, engine="mlx")
    return output / "mlx", compress(str(BUNDLED), output, chosen)


def test_the_file_has_the_size_and_the_formats_of_the_report(result):
    folder, report = result
    written = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert 0.99 * SIZE < written <= SIZE
    assert [(export.kind, export.stored_bytes) for export in report.exports] == [("mlx", written)]
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization"] == config["quantization_config"]
    described = {
        name: f"affine{own['bits']}_{own['group_size']}"
        for name, own in config["quantization"].items()
        if isinstance(own, dict)
    }
    assert described == {layer.name: layer.block_type for layer in report.layers if layer.kind == "quantized"}
    assert "model.embed_tokens" in described
    assert (folder / "tokenizer.json").is_file()


def test_mlx_computes_what_our_reconstruction_does(result):
    pytest.importorskip("mlx.core", reason="MLX is needed: pip install mlx mlx-cpu mlx-lm")
    mlx_lm = pytest.importorskip("mlx_lm")
    import mlx.core as mx

    model, tokenizer = mlx_lm.load(str(result[0]))
    model.set_dtype(mx.float32)
    tokens = tokenizer.encode("If the file does not exist, the module")
    found = np.array(model(mx.array([tokens])))[0]
    ours = load_model(open_model(result[0]), torch.device("cpu"))
    with torch.no_grad():
        expected = ours.float()(torch.tensor([tokens])).logits[0].numpy()
    assert np.allclose(found, expected, atol=1e-3)


def test_a_size_that_cannot_be_reached_is_refused(tmp_path, settings):
    with pytest.raises(InfeasibleBudgetError):
        compress(str(BUNDLED), tmp_path, settings(ratio=None, target_bytes=100_000, engine="mlx"))


def test_the_engine_decides_kinds_and_exports():
    config = compression_config(engine="mlx", target_bytes=10**6)
    assert (config.kinds, config.export, config.budget) == (("quantized",), ("mlx",), "bytes")
    assert config.decides_tables
    assert fewest_bytes(512, 10, MLX.codes) == BLOCK_FORMATS["affine2_128"].stored_bytes(512, 10)
    assert fewest_bytes(50, 10, MLX.codes) is None


def test_what_it_does_not_read_is_refused():
    with pytest.raises(InvalidConfigError, match="engine mlx does not read export gguf"):
        compression_config(engine="mlx", bits=5, export=("gguf",))
    with pytest.raises(UnsupportedArchitectureError, match="For MLX, Rocket writes"):
        check_engine({"architectures": ["GPT2LMHeadModel"]}, 2, MLX, "the model")
    with pytest.raises(InvalidConfigError, match="MLX runs models in 16 bits"):
        check_engine({"architectures": ["LlamaForCausalLM"]}, 4, MLX, "the model")
    mixture = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
    with pytest.raises(UnsupportedArchitectureError):
        check_engine(mixture, 2, MLX, "the model")
