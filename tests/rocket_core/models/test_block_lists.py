import json

import pytest
import torch

from rocket_core.checkpoint import open_checkpoint
from rocket_core.estimates.footprint import describe_model
from rocket_core.models.architecture import build_architecture, read_config
from tests.reference.tiny_vision import VISION, save_tiny_vision

# List of blocks and tower.
EXPECTED = {
    "qwen2_vl": ("model.language_model.layers", "model.visual"),
    "qwen2_5_vl": ("model.language_model.layers", "model.visual"),
    "qwen3_vl": ("model.language_model.layers", "model.visual"),
    "qwen3_vl_moe": ("model.language_model.layers", "model.visual"),
    "llava": ("model.language_model.layers", "model.vision_tower"),
    "idefics3": ("model.text_model.layers", "model.vision_model"),
    "smolvlm": ("model.text_model.layers", "model.vision_model"),
    "gemma3": ("model.language_model.layers", "model.vision_tower"),
    "llama4": ("language_model.model.layers", "vision_model"),
}


@pytest.mark.parametrize("family", VISION)
def test_the_decoder_is_told_from_the_tower(family, tmp_path):
    folder = save_tiny_vision(family, tmp_path / "model")
    architecture = build_architecture(read_config(folder), torch.float32)
    assert (architecture.lists[0].name, architecture.tower) == EXPECTED[family]
    assert len(architecture.lists) == 1
    assert architecture.is_causal
    assert architecture.class_name == "AutoModelForImageTextToText"
    # A service, which only reads headers, selects the same layers, and routers, which it cannot tell from layers.
    settings = json.loads((folder / "config.json").read_text())
    described = describe_model(settings, open_checkpoint(folder).weights)
    built = [architecture.shape(name) for block in architecture.layers for name in block]
    routers = {"qwen3_vl_moe": 2, "llama4": 2}.get(family, 0)
    assert len(described.shapes) == len(built) + routers
    assert set(built) <= set(described.shapes)
