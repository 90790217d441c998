"""Requests that are refused before any work: nothing to do, rows that fit no format, an output folder in use."""

import pytest
import torch

from rocket_core.checkpoint import WeightLoader
from rocket_core.errors import InfeasibleBudgetError, InvalidConfigError
from rocket_core.hub.requests import check_request
from rocket_core.pipeline import compress
from rocket_core.sizes.block_types import BLOCK_FORMATS, BLOCK_TYPES
from tests.reference import gguf_models


def save(family, folder, **sizes):
    model, _ = gguf_models.save(family, folder, num_hidden_layers=2, **sizes)
    model.to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


def refused(error, said, model, output, config, *, is_known_family=True):
    """Check that a run is refused, and by config.json and headers alone where these tell the layers."""
    for act in [compress, *[lambda model, _, config: check_request(model, config)] * is_known_family]:
        with pytest.raises(error, match=said):
            act(model, output, config)
    assert not output.exists()


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ({"ratio": 0.0}, "a ratio of 0 removes nothing; ask for more"),
        ({"target_bytes": 10**9}, r"the model takes .*(kB|MB) as it is; ask for less"),
        ({"bits": 16}, "the selected layers take 16 bits per weight as they are; ask for less"),
    ],
)
@pytest.mark.parametrize("engine", ["rocket", "llama.cpp", "vllm"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_target_that_the_model_meets_is_nothing_to_do(target, said, engine, family, tmp_path, settings):
    config = settings(**{"ratio": None, "preset": "fast", "engine": engine} | target)
    said, known = f"nothing is to be done: {said}", family == "llama" or config.target_bytes is not None
    refused(InvalidConfigError, said, save(family, tmp_path / "model"), tmp_path / "out", config, is_known_family=known)


@pytest.mark.parametrize("target", [{"bits": 8}, {"ratio": 0.4, "budget": "bytes"}, {"target_bytes": 90_000}])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_rows_that_fit_no_block_type_are_named(target, family, tmp_path, settings):
    # Rows of 40 inputs, but for those of down_proj.
    model = save(family, tmp_path / "model", hidden_size=40, head_dim=10, intermediate_size=64)
    config = settings(**{"ratio": None, "preset": "fast", "engine": "llama.cpp"} | target)
    said = r"is|are out of reach.*Rows of 40 inputs \(.*q_proj.*\) fit no block type of llama.cpp.*engine rocket"
    refused(InfeasibleBudgetError, said, model, tmp_path / "out", config, is_known_family=family == "llama")


def test_a_model_of_rows_that_do_not_fit_stays_as_it_is(tmp_path, settings):
    model = save("llama", tmp_path / "model", hidden_size=40, head_dim=10, intermediate_size=72)
    config = settings(ratio=None, bits=15, preset="fast", engine="llama.cpp")
    said = r"no selected layer can be made smaller\. Rows of 40 inputs \(.*\) and of 72 inputs \(down_proj\) fit no"
    refused(InfeasibleBudgetError, said, model, tmp_path / "out", config)


def test_the_fewest_bits_of_block_types_are_known(tmp_path, settings):
    # Rows of 64 and 96 inputs, for which there are no types of blocks of 256.
    least = min(BLOCK_FORMATS[name].bits_per_weight for name in BLOCK_TYPES if BLOCK_FORMATS[name].fits(32))
    model = save("llama", tmp_path / "model")
    for bits, is_refused in ((least - 0.1, True), (least + 0.1, False)):
        config = settings(ratio=None, bits=bits, preset="fast", engine="llama.cpp")
        if is_refused:
            refused(InfeasibleBudgetError, f"at least {least}; ask for that or more", model, tmp_path / "out", config)
        else:
            check_request(model, config)


@pytest.mark.parametrize(
    ("left", "said"),
    [
        ("report.json", "already holds the result of another compression"),
        (".rocket-work/run.json", "holds the work of an unfinished run; resume it"),
        ("rocket/config.json", "already holds rocket, which this run has not made"),
        (None, "is a file; give a folder to write to"),
    ],
)
def test_a_used_output_folder_is_refused_first(left, said, tmp_path, settings, monkeypatch):
    monkeypatch.setattr(WeightLoader, "__init__", lambda *_: pytest.fail("the model was read"))
    output = tmp_path / "out"
    file = output if left is None else output / left
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("{}")
    with pytest.raises(InvalidConfigError, match=said):
        compress("no/such-model", output, settings())
    assert file.read_text() == "{}"
