"""Quality on a real model, compared with the figures of the paper's own implementation and of its preset."""

import argparse
import functools
from pathlib import Path

import pytest

from benchmarks import quality
from tests.sampling import sweep

SHARED = Path(__file__).parents[2].parent / "shared" / "data"

pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="needs the real model and text of ../shared/data")


@functools.cache
def measured(variant, ratio):
    given = argparse.Namespace(
        model=SHARED / "models" / "stories260K-hf",
        calibrate=SHARED / "text" / "tinystories_train.jsonl",
        measure=SHARED / "text" / "tinystories_val.jsonl",
        samples=128,
        length=256,
        windows=96,
        tasks=[],
        items=None,
    )
    return quality.run(given, variant, ratio, "parameters", seed=0)


@pytest.mark.parametrize(("ratio", "bar"), sweep([(0.4, 8.9)], soak=[(0.2, 2.4), (0.3, 4.4), (0.5, 22.5)]))
def test_the_paper_preset_is_no_worse_than_the_papers_code(ratio, bar):
    paper = measured("paper", ratio)
    assert paper["quality"] <= bar
    assert ratio - 1e-12 <= paper["achieved"] <= ratio + 0.015 * (1 - ratio)


@pytest.mark.soak
def test_the_best_preset_loses_a_tenth_of_the_papers_loss():
    paper, best = measured("paper", 0.4), measured("best", 0.4)
    assert best["quality"] - 1 <= (paper["quality"] - 1) / 10
    assert 0.4 - 1e-12 <= best["achieved"] <= 0.4 + 0.002 * 0.6
