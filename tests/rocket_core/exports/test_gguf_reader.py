"""Weights that are read from GGUF files under their names in a checkpoint."""

import json

import pytest
import torch

from rocket_core.errors import UnsupportedExportError
from rocket_core.evaluation import load_model, open_gguf, open_model
from rocket_core.exports.gguf_model import plan_gguf
from rocket_core.exports.gguf_reader import read_weights
from tests.reference import gguf_models
from tests.rocket_core.exports.test_gguf_engine import export, tensors_of


@pytest.mark.parametrize("name", gguf_models.MODELS)
def test_weights_are_those_that_were_written(name, tmp_path):
    gguf_models.save(name, tmp_path, num_hidden_layers=6)
    export(tmp_path, tmp_path / "model.gguf")
    plan = plan_gguf(json.loads((tmp_path / "config.json").read_text()), tmp_path)
    found, stored = read_weights(tmp_path / "model.gguf", plan), tensors_of(tmp_path)
    assert found.keys() == stored.keys()
    for key, tensor in found.items():
        # 1 is added to norms of Gemma, and subtracted.
        torch.testing.assert_close(tensor, stored[key], rtol=0, atol=1e-6 if "norm" in key else 0, msg=key)


def test_tensors_of_other_families_are_refused(tmp_path):
    gguf_models.save_tokenizer("gpt-2", tmp_path)
    model_class, config_class, settings = gguf_models.MODELS["llama"]
    config = config_class(**(gguf_models._COMMON | settings)).to_dict() | {"architectures": [model_class.__name__]}
    plan = plan_gguf(config, tmp_path)
    for name in ("blk.0.ffn_up_exps.weight", "blk.0.ffn_up", "position_embd.weight"):
        with pytest.raises(UnsupportedExportError, match=name):
            plan.keys(name)


@pytest.mark.parametrize("name", ["gemma", "olmoe", "gpt_oss"])
def test_models_that_transformers_does_not_read_are_evaluated(name, tmp_path):
    model, _ = gguf_models.save(name, tmp_path / "original")
    (tmp_path / "file").mkdir()
    export(tmp_path / "original", tmp_path / "file" / "model.gguf")
    read = load_model(open_gguf(tmp_path / "file", open_model(tmp_path / "original")), torch.device("cpu"))
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(read(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-4)
