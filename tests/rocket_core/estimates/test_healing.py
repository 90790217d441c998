import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rocket_core.config import compression_config
from rocket_core.estimates.footprint import describe_model
from rocket_core.estimates.healing import HealingWork, healing_operations
from rocket_core.evaluation import open_model
from rocket_core.inspection.files.safetensors_headers import read_header
from rocket_core.inspection.headers.weight_summary import summarize
from rocket_core.models.architecture import build_architecture, read_config
from rocket_core.pipeline.stages.healing.plan import plan_healing
from tests.rocket_core.estimates.test_duration import LLAMA_1B, ZEN_5, shape

SAMPLE = Path(__file__).parents[3] / "examples" / "tiny-llama"


def sample_model():
    weights = SAMPLE / "model.safetensors"
    return describe_model(
        settings(), summarize(read_header(weights, str(weights))), ignore=(), dtype="auto", vision=False
    )


def settings():
    return json.loads((SAMPLE / "config.json").read_text())


def config(tokens, length=256):
    return compression_config(ratio=0.3, heal_tokens=tokens, calibration={"sequence_length": length})


@pytest.mark.parametrize(("tokens", "measured"), [(20_000, 13.8), (50_000, 38.1)])
def test_healing_is_within_the_stated_factor(tokens, measured):
    """The model in `examples`, as `python -m benchmarks.duration --heal` measured it on one core of Zen 5."""
    model = sample_model()
    counted = healing_operations(model, HealingWork.expected(config(tokens), model, settings()))
    assert measured / 1.5 < counted.duration(ZEN_5) < 1.5 * measured


@pytest.mark.parametrize(("tokens", "length"), [(1, 256), (5_000, 256), (60_000, 256), (60_000, 200)])
def test_what_is_expected_to_be_read_is_what_a_plan_reads(tokens, length):
    expected = HealingWork.expected(config(tokens, length), sample_model(), settings())
    architecture = build_architecture(read_config(SAMPLE), torch.float32)
    plan = plan_healing(open_model(SAMPLE), architecture, config(tokens, length).healing).work
    assert expected == plan


def test_nothing_is_expected_where_nothing_is_healed():
    assert HealingWork.expected(compression_config(ratio=0.3), sample_model(), settings()) is None


def test_windows_longer_than_a_step_make_fewer_steps():
    long = {"max_position_embeddings": 8192, "vocab_size": 2048}
    found = HealingWork.expected(config(40_960, 4096), shape(LLAMA_1B), long)
    assert (found.steps, found.tokens) == (10, 40_960)


def test_blocks_that_run_again_take_longer():
    work = HealingWork(
        steps=10, tokens=10_240, held_out_tokens=0, length=1024, vocabulary=2048, trained=0, recomputes=False
    )
    once, twice = (
        healing_operations(shape(LLAMA_1B), replace(work, recomputes=again)).products for again in (False, True)
    )
    assert twice == pytest.approx(once * 5 / 4)
