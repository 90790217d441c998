"""The tables that `benchmarks.llama_cpp` makes, and what it gives to and reads from llama.cpp's programs."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.half_precision import copy_in_half_precision
from benchmarks.llama_cpp import bars, calibration_text, table, write_dense
from benchmarks.llama_cpp_programs import NAMES, Programs, check_programs
from benchmarks.measured_runs import Results
from benchmarks.rivals import RivalFailedError
from rocket_core.calibration.datasets import documents, token_windows
from tests.reference.tiny_models import save_tiny_model


def row(name, kl, *, seed=0, size=1000):
    return {
        "name": name, "seed": seed, "bytes": size, "kl": kl, "excess": 0.1, "agreement": 0.9, "kl_in_llama_cpp": 2 * kl,
    }  # fmt: skip


@pytest.fixture
def results():
    return Results(
        [
            row("llama.cpp Q6_K", 0.4),
            row("llama.cpp Q6_K", 0.5, seed=1, size=1001),
            row("rocket best, bytes of Q6_K", 0.2, size=999),
            row("rocket best, bytes of Q6_K", 0.3, seed=1),
            row("llama.cpp Q2_K", 1.0),
            row("rocket best, bytes of Q2_K", 0.9, size=1010),
        ]
    )


def test_rocket_is_compared_with_the_file_of_its_size_and_seed(results):
    lines = list(table(results, ["Q6_K", "Q2_K"], ["best"]))
    assert "| llama.cpp Q6_K | 1,001 | 0.45 ± 0.05 |  | 0.1 ± 0 | 0.9 ± 0 | 0.9 ± 0.1 |  |" in lines
    assert any("| 1,000 | 0.25 ± 0.05 | 0.55 ± 0.05 |" in line and "| 0.55 ± 0.05 |" in line[60:] for line in lines)
    assert len({line.count("|") for line in lines}) == 1


def test_requirements_are_on_divergence_and_size(results):
    lines = list(bars(results, ["Q6_K", "Q2_K"], ["best"]))
    assert "| rocket best, bytes of Q6_K: KL, of that of llama.cpp Q6_K | at most 0.8 | 0.55 ± 0.05 | holds |" in lines
    assert "| rocket best, bytes of Q2_K: KL, of that of llama.cpp Q2_K | at most 0.8 | 0.9 | missed |" in lines
    assert "| best: bytes exceeded, by a part of them | at most 0 | 0.01 | missed |" in lines


def test_llama_cpp_reads_the_tokens_that_rocket_reads(tmp_path):
    folder = save_tiny_model("llama", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = calibration_text(folder, "builtin", 3, tokens=5000)
    # As llama.cpp reads it: after the first separator, special tokens are recognised.
    read = tokenizer(tokenizer.bos_token + text, add_special_tokens=False, verbose=False)["input_ids"]
    ours = token_windows(documents("builtin", seed=3), tokenizer, count=5000, length=1).flatten().tolist()
    assert len(read) >= 5000
    assert read[:5000] == ours


def test_the_dense_file_has_the_models_weights(tmp_path):
    pytest.importorskip("gguf", reason="transformers reads GGUF files with it")
    folder = copy_in_half_precision(save_tiny_model("llama", tmp_path / "model"), tmp_path / "half")
    (tmp_path / "written").mkdir()
    write_dense(folder, tmp_path / "written" / "dense.gguf")
    own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "written", gguf_file="dense.gguf", dtype=torch.float32)
    for name, weight in own.state_dict().items():
        assert torch.equal(read.state_dict()[name], weight), name


def test_the_divergence_is_read_from_what_llama_cpp_prints(tmp_path):
    printed = [
        "====== KL divergence statistics ======",
        "Mean    KLD:   0.012345 ±   0.000120",
        "Maximum KLD:   1.5",
    ]
    programs = Programs(tmp_path, 256, run=lambda command: printed)
    file = tmp_path / "model.gguf"
    assert programs.divergence(file, file, 4, file) == 0.012345
    with pytest.raises(RivalFailedError, match="no mean KLD: failed to open"):
        Programs(tmp_path, 256, run=lambda command: ["failed to open"]).divergence(file, file, 4, file)


def test_a_cut_output_of_llama_cpp_is_asked_for_again(tmp_path):
    answers = iter([["41 42.0 0.00577"], ["Mean    KLD:   0.005770 ±   0.000090"]])
    programs = Programs(tmp_path, 256, run=lambda command: next(answers))
    file = tmp_path / "model.gguf"
    assert programs.divergence(file, file, 4, file) == 0.00577


def test_an_importance_matrix_that_was_not_written_is_reported(tmp_path):
    programs = Programs(tmp_path, 256, run=lambda command: [])
    with pytest.raises(RivalFailedError, match="shorter than the windows"):
        programs.importance(tmp_path / "model.gguf", tmp_path / "text.txt", 4, tmp_path / "matrix.gguf")


def test_a_missing_program_is_named(tmp_path):
    for name in NAMES[:-1]:
        (tmp_path / name).touch()
    with pytest.raises(RivalFailedError, match=f"has no {NAMES[-1]}"):
        check_programs(tmp_path)
