"""The tables of families in the documentation, held against the default sizes of transformers."""

import re
from pathlib import Path

import pytest
import torch
import transformers

from rocket_core.models.architecture import build_architecture
from tests.sampling import sweep

PAGES = Path(__file__).parents[2] / "docs" / "how-to"
CONFIGS = {
    "vision": {
        "Qwen2-VL": "Qwen2VLConfig",
        "Qwen2.5-VL": "Qwen2_5_VLConfig",
        "Qwen3-VL": "Qwen3VLConfig",
        "Qwen3-VL-MoE": "Qwen3VLMoeConfig",
        "LLaVA": "LlavaConfig",
        "Idefics3": "Idefics3Config",
        "SmolVLM": "SmolVLMConfig",
        "Gemma 3": "Gemma3Config",
    },
    "speech": {
        "Qwen2-Audio": "Qwen2AudioConfig",
        "Voxtral": "VoxtralConfig",
        "Qwen3-ASR": "Qwen3ASRConfig",
        "Granite Speech": "GraniteSpeechConfig",
        "VibeVoice": "VibeVoiceConfig",
        "VibeVoice ASR": "VibeVoiceAsrConfig",
    },
    "mixtures": {
        "Mixtral": "MixtralConfig",
        "Qwen2-MoE": "Qwen2MoeConfig",
        "Qwen3-MoE": "Qwen3MoeConfig",
        "OLMoE": "OlmoeConfig",
        "DeepSeek-V2": "DeepseekV2Config",
        "gpt-oss": "GptOssConfig",
        "Granite-MoE": "GraniteMoeConfig",
        "Phi-MoE": "PhimoeConfig",
    },
}
# Building the modules of thousands of experts takes seconds.
SLOW = set(CONFIGS["mixtures"]) - {"Mixtral"} | {"Qwen3-VL-MoE"}
CASES = [(page, family) for page, families in CONFIGS.items() for family in families]
# The column of each fraction, by page.
COLUMNS = {"vision": ("selected", "tower", "tables"), "speech": ("selected", "tables"), "mixtures": (None, "selected")}


def told(page, family):
    """Return the fractions in a family's row, by what they are of."""
    row = next(line for line in (PAGES / f"{page}.md").read_text().splitlines() if line.startswith(f"| {family} |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")][1:]
    names = COLUMNS[page]
    found = {name: re.fullmatch(r"([\d.]+) %", cell) for name, cell in zip(names, cells, strict=False) if name}
    return {name: float(match[1]) for name, match in found.items()}


@pytest.mark.parametrize(
    ("page", "family"),
    sweep([case for case in CASES if case[1] not in SLOW], soak=[case for case in CASES if case[1] in SLOW]),
)
def test_a_family_has_the_fractions_of_its_default_sizes(page, family):
    architecture = build_architecture(getattr(transformers, CONFIGS[page][family])(), torch.bfloat16)
    layers = [architecture.shape(name) for name in architecture.tower_layers]
    tables = [architecture.model.get_submodule(table.name).weight.numel() for table in architecture.tables]
    counts = {
        "selected": architecture.compressible_parameters,
        "tower": sum(d_in * d_out for d_in, d_out in layers),
        "tables": sum(tables),
    }
    expected = told(page, family)
    found = {name: round(100 * counts[name] / architecture.parameters, 1) for name in expected}
    assert found == expected
