"""Tables that `benchmarks.bits` makes of its runs, and what it counts."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from benchmarks.bits import bars, planned, table, timed
from benchmarks.half_precision import copy_in_half_precision
from benchmarks.measured_runs import Results, saved_runs, stored_bytes
from rocket_core.config import compression_config
from rocket_core.sizes.target import ByBytes, ByFormat, ByRatio
from tests.reference.tiny_models import save_tiny_model


def row(name, kl, *, seed=0, fraction=0.2, excess=0.1):
    return {
        "name": name, "seed": seed, "fraction": fraction, "excess": excess, "kl": kl, "agreement": 0.9,
        "file_fraction": 0.3, "cpu_seconds": 3.0 + seed,
    }  # fmt: skip


@pytest.fixture
def results():
    return Results(
        [
            row("gptq int3", 0.4, fraction=0.22),
            row("gptq int3", 0.5, seed=1, fraction=0.22),
            row("best at 0.2, fixed length", 0.2, excess=0.17),
            row("best at 0.2, fixed length", 0.3, seed=1, excess=0.21, fraction=0.2001),
            row("best at 0.2", 0.2, excess=0.14),
            row("best at 0.2", 0.3, seed=1, excess=0.18),
        ]
    )


def test_the_table_has_means_and_spreads(results):
    lines = list(table(results))
    assert "| gptq int3 | 0.22 ± 0 | 0.3 ± 0 | 0.45 ± 0.05 | 0.1 ± 0 | 0.9 ± 0 | 4 |" in lines
    assert len({line.count("|") for line in lines}) == 1


def test_requirements_compare_runs_of_the_same_seed(results):
    lines = list(bars(results, ["best"]))
    assert "| best at 0.2, fixed length: KL, of that of gptq int3 | at most 0.58 | 0.55 ± 0.05 | holds |" in lines
    assert "| best at 0.2: KL, of that of gptq int3 | at most 0.42 | 0.55 ± 0.05 | missed |" in lines
    assert "| best at 0.2, the better: excess perplexity | at most 0.18 | 0.16 ± 0.02 | holds |" in lines
    assert any(line.startswith("| best: bytes exceeded") and line.endswith("missed |") for line in lines)
    assert not any("0.15" in line for line in lines)


def test_every_planned_run_has_valid_settings():
    names, targets, storages = [], [], set()
    for name, settings in (*planned(["fast"], 1000), *timed(["fast"])):
        names.append(name)
        config = compression_config(**settings)
        targets.append(config.target)
        storages.add((config.target, config.storage))
    assert len(set(names)) == len(names)
    assert targets[:3] == [ByFormat(bits=bits, group_size=32) for bits in (4, 3, 2)]
    assert storages >= {(ByRatio(ratio=0.719), "file"), (ByRatio(ratio=0.719), "memory")}
    assert storages >= {(ByBytes(target_bytes=270), "file"), (ByBytes(target_bytes=270), "memory")}


def test_requirements_on_files_times_and_the_knapsack():
    rows = [
        row("fast, file at 0.27", 0.1, excess=0.05) | {"file_fraction": 0.2699},
        row("fast, file at 0.27, fixed length", 0.1, excess=0.07) | {"file_fraction": 0.26},
        {"name": "fast, predicted loss", "seed": 0, "formats": 24, "part": 1.01},
        row("fast alone", 0.1) | {"cpu_seconds": 5.0},
        row("fast alone, kinds of 16 bits", 0.1) | {"cpu_seconds": 4.0},
        row("best alone", 0.1) | {"cpu_seconds": 20.0},
    ]
    lines = list(bars(Results(rows), ["fast", "best"]))
    assert "| fast, file at 0.27, the better: excess perplexity | at most 0.06 | 0.05 | holds |" in lines
    assert "| fast: bytes exceeded, by a part of them | at most 0 | -0.0003704 | holds |" in lines
    assert "| fast: bytes left over, of them | at most 0.002 | 0.03704 | missed |" in lines
    assert "| fast: predicted loss, of that of one format at equal bytes | at most 1 | 1.01 | missed |" in lines
    assert "| fast: CPU time, of that of fast alone, kinds of 16 bits | at most 2 | 1.25 | holds |" in lines
    assert "| best: CPU time, of that of fast alone | at most 3 | 4 | missed |" in lines


def test_saved_runs_are_not_repeated(tmp_path):
    calls = []

    def measured():
        calls.append(1)
        return {"kl": len(calls)}

    file = tmp_path / "runs.json"
    asked = [("a", 0, measured), ("a", 1, measured)]
    first = saved_runs(file, {"windows": 3}, asked)
    assert saved_runs(file, {"windows": 3}, [*asked, ("b", 0, measured)])[:2] == first
    assert len(calls) == 3
    assert saved_runs(file, {"windows": 4}, asked[:1])[0]["kl"] == 4
    assert [row["name"] for row in json.loads(file.read_text())] == ["a", "a", "b", "a"]


def test_bytes_are_those_of_the_layers_tensors(tmp_path):
    tensors = {
        "model.0.up.weight": torch.zeros(12, dtype=torch.uint8),
        "model.0.up.weight_scale": torch.zeros(6, dtype=torch.uint8),
        "model.0.up.bias": torch.zeros(9),
        "model.0.down.weight": torch.zeros(5),
        "model.0.norm.weight": torch.zeros(100),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    assert stored_bytes(tmp_path, {"model.0.up"}) == 18
    assert stored_bytes(tmp_path, {"model.0.up", "model.0.down"}) == 28


def test_a_copy_in_half_precision_loads_in_float16(tmp_path):
    folder = save_tiny_model("llama", tmp_path / "model")
    copy = copy_in_half_precision(folder, tmp_path / "copy")
    whole, half = (load_file(path / "model.safetensors") for path in (folder, copy))
    assert whole.keys() == half.keys()
    assert all(torch.equal(half[name], whole[name].half()) for name in whole)
    assert AutoModelForCausalLM.from_pretrained(copy).dtype == torch.float16
