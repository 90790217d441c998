"""Exports for MLX in mlx-lm, which has nothing of Rocket installed: logits, greedy tokens, a batch, chat template.

In float32, logits are those of our reconstruction; in bfloat16, in which MLX computes by default, within its rounding.
"""

import os
import sys
import sysconfig

import pytest
import torch

from benchmarks.engine_environments import python_of
from rocket_core.config import compression_config
from rocket_core.pipeline import compress
from tests.engines.conftest import PROGRAMS, PROMPTS, agree_on_prompts, agree_on_tokens, answers_of, own_model

pytestmark = pytest.mark.engines


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.15)])
@pytest.mark.parametrize("size", [1_000_000, 1_600_000, 2_400_000])
def test_mlx_computes_our_reconstruction(exported, size, dtype, tolerance):
    folder = exported("mlx", "mlx", target_bytes=size)
    program = [str(python_of("mlx")), str(PROGRAMS / "run_mlx.py"), str(folder), *PROMPTS, dtype]
    found = answers_of(program, {**os.environ, "OMP_NUM_THREADS": "1"})
    agree_on_prompts(folder, found)
    model = own_model(folder)
    for ids, logits, *answers in zip(found["ids"], found["logits"], found["tokens"], found["batch"], strict=True):
        with torch.no_grad():
            own = model(torch.tensor([ids])).logits[0]
        assert float((torch.tensor(logits) - own).square().mean().sqrt()) <= tolerance
        for tokens in answers:
            agree_on_tokens(model, ids, tokens, 5 * tolerance)


def test_a_compression_compares_mlx_with_its_weights(tmp_path, monkeypatch):
    """With mlx-lm in the environment of the compression, as on a Mac."""
    (packages,) = python_of("mlx").parents[1].glob("lib/python*/site-packages")
    monkeypatch.setattr(sys, "path", [*sys.path, str(packages)])
    monkeypatch.setenv("PYTHONPATH", f"{sysconfig.get_path('purelib')}:{packages}")
    report = compress("examples/tiny-llama", tmp_path, compression_config(preset="instant", bits=5, engine="mlx"))
    loading = report.exports[0].loading
    assert loading.anomaly is None
    assert (loading.engine, loading.new_tokens, loading.splits_alike) == ("MLX", 20, True)
    assert 0 < loading.kl_divergence < 0.02
