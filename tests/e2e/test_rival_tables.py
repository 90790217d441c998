"""The table that `benchmarks.rivals` makes of its runs, and how it guards the rivals' environments."""

import sys

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.measured_runs import block_weights
from benchmarks.rivals import (
    PROGRAMS,
    RIVALS,
    RivalFailedError,
    check_plan,
    lines_of,
    output_of,
    table,
    untouched,
)


def plan(*packages):
    return {"install": [{"metadata": {"name": name, "version": version}} for name, version in packages]}


def row(name, kl, **more):
    return {"name": name, "fraction": 0.28, "kl": kl, "excess": 0.05, "agreement": 0.9} | more


def test_rocket_is_compared_with_the_rival_above_it():
    lines = list(
        table(
            [
                row("A, 4 bits", 0.2, untouched=0, layers=7),
                row("rocket best, bytes of A, 4 bits", 0.05),
                row("A, 3 bits", 0.8, untouched=2, layers=7),
                row("rocket best, bytes of A, 3 bits", 0.2),
                {"name": "B, 4 bits", "failure": "no kernel"},
            ]
        )
    )
    assert "| A, 4 bits | 0.2800 | 0.2 |  | 0.05 | 0.9 |" in lines
    assert [line.split("|")[4].strip() for line in lines[2:6]] == ["", "0.25", "", "0.25"]
    assert any("A, 3 bits (2 of 7 layers left alone)" in line for line in lines)
    assert "| B, 4 bits | does not run: no kernel | | | | |" in lines
    assert len({line.count("|") for line in lines}) == 1


def test_encoders_are_compared_by_their_drift():
    lines = list(
        table(
            [
                {"name": "A, 4 bits", "fraction": 0.28, "drift": 0.2, "untouched": 0, "layers": 7},
                {"name": "rocket best, bytes of A, 4 bits", "fraction": 0.28, "drift": 0.05},
                {"name": "B, 4 bits", "failure": "no kernel"},
            ]
        )
    )
    assert lines[0] == "| | bytes of the linears | drift | of the rival's |"
    assert lines[3] == "| rocket best, bytes of A, 4 bits | 0.2800 | 0.05 | 0.25 |"
    assert len({line.count("|") for line in lines}) == 1


@pytest.mark.parametrize(
    ("packages", "said"),
    [
        ([("torch", "2.14.0")], "torch 2.14.0 instead of 2.13.0"),
        ([("torch", "2.13.0"), ("nvidia-cublas-cu12", "12.1")], "a part of CUDA"),
        ([("torch", "2.13.0"), ("cuda-toolkit", "13")], "a part of CUDA"),
    ],
)
def test_another_torch_or_cuda_is_refused_before_a_download(packages, said):
    with pytest.raises(RivalFailedError, match=said):
        check_plan(plan(*packages), "2.13.0", "")


def test_the_same_torch_is_accepted():
    check_plan(plan(("torch", "2.13.0+cpu"), ("nvidia-ml-py", "13.6"), ("loguru", "0.7")), "2.13.0+cpu", "")


def test_a_program_that_fails_or_hangs_is_reported():
    assert output_of([sys.executable, "-c", "print('first'); print('last')"]) == "last"
    with pytest.raises(RivalFailedError, match="ValueError: odd"):
        output_of([sys.executable, "-c", "raise ValueError('odd')"])
    with pytest.raises(RivalFailedError, match="more than 0 seconds"):
        output_of([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.3)


def test_layers_that_a_rival_left_alone_are_counted(tmp_path):
    dense = {
        "model.layers.0.up.weight": torch.zeros(4, 6),
        "model.layers.0.down.weight": torch.zeros(6, 4),
        "model.layers.0.norm.weight": torch.zeros(6),
        "embed.weight": torch.zeros(9, 6),
    }
    save_file(dense, tmp_path / "model.safetensors")
    layers = block_weights(tmp_path)
    assert layers == {"model.layers.0.up": 24, "model.layers.0.down": 24}
    packed = tmp_path / "packed"
    packed.mkdir()
    save_file(
        {"model.layers.0.up.weight_packed": torch.zeros(3), "model.layers.0.down.weight": torch.zeros(6, 4)},
        packed / "model.safetensors",
    )
    assert untouched(packed, list(layers)) == 1


def test_every_rival_has_its_program():
    assert all((PROGRAMS / rival.program).is_file() and "==" in rival.requirement for rival in RIVALS.values())


def test_a_rival_that_a_signal_ended_is_told_as_that():
    with pytest.raises(RivalFailedError, match="ended by SIGILL"):
        lines_of([sys.executable, "-c", "import os, signal; print('begun'); os.kill(os.getpid(), signal.SIGILL)"])
