"""Ignore patterns that name the token embedding or the head."""

import pytest
import torch

from rocket_core.checkpoint import find_model
from rocket_core.config import compression_config
from rocket_core.errors import UnmatchedIgnoreError, UnsupportedArchitectureError
from rocket_core.inspection.checks.preconditions import check_ignore
from rocket_core.inspection.headers.layer_names import PREFIXES
from rocket_core.models.architecture import build_architecture, ignored_layers, read_config
from rocket_core.models.token_tables import token_modules
from rocket_core.pipeline.preflight import prepare_run
from tests.reference.tiny_models import FAMILIES, save_tiny_model
from tests.rocket_core.inspection.checks.test_preconditions import MORE, described, save

BYTES = {"target_bytes": 10**8, "kinds": ("quantized",), "calibration": {"samples": 1, "sequence_length": 8}}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", [*FAMILIES, *MORE])
def test_names_of_tables_are_accepted_at_once(family, tmp_path):
    folder = save(family, tmp_path)
    config, weights = described(folder)
    try:
        architecture = build_architecture(read_config(folder), torch.float32)
    except UnsupportedArchitectureError:
        return
    names = [name for block in architecture.layers for name in block]
    tables = token_modules(architecture.model)
    assert tables or architecture.kind != "text"
    for name in tables:
        patterns = (name, name.rpartition(".")[2], f"*{name[3:]}")
        assert name in ignored_layers(names, patterns, tables)
        check_ignore(config, weights, patterns, "m")


@pytest.mark.parametrize("family", sorted({"llama", "gpt2", "bert"} & set(PREFIXES)))
def test_a_head_that_no_model_has_is_refused(family, tmp_path):
    config, weights = described(save_tiny_model(family, tmp_path))
    with pytest.raises(UnmatchedIgnoreError):
        check_ignore(config, weights, ("lm_heads",), "m")


@pytest.mark.parametrize(
    ("family", "pattern", "left", "reported"),
    [
        ("llama", "lm_head", ("model.embed_tokens",), "lm_head"),
        ("llama", "embed_tokens", ("lm_head",), "model.embed_tokens"),
        ("gpt2", "lm_head", (), "transformer.wte"),
        ("gpt2", "wte", (), "transformer.wte"),
    ],
)
def test_ignored_tables_stay_dense(family, pattern, left, reported, tmp_path):
    folder = save_tiny_model(family, tmp_path)
    run = prepare_run(find_model(str(folder)), compression_config(**BYTES, ignore=(pattern,)))
    assert tuple(table.name for table in run.tables) == left
    assert run.skipped == {reported: f"ignored by {pattern!r}"}


def test_heads_may_be_ignored_where_none_is_quantized(tmp_path):
    folder = save_tiny_model("llama", tmp_path)
    config = compression_config(ratio=0.3, ignore=("lm_head",), calibration=BYTES["calibration"])
    run = prepare_run(find_model(str(folder)), config)
    assert (run.tables, run.skipped) == ((), {})
