"""The tables of families in the documentation, held against the shapes of released models."""

from pathlib import Path

import pytest

from benchmarks.families import FAMILIES, cells, fractions_of
from tests.sampling import sweep

PAGES = Path(__file__).parents[2] / "docs" / "how-to"
# Some for each page and each kind of tower; building the modules of thousands of experts takes seconds.
KEPT = ["Mixtral", "Granite-MoE", "Qwen3-VL", "LLaVA", "SmolVLM", "Llama 4", "Qwen2-Audio", "VibeVoice"]
# Numbers of parameters that the publishers state, in the files or on the cards.
PUBLISHED = {
    "Mixtral": 46_702_792_704,
    "Qwen2-MoE": 14_315_784_192,
    "Qwen3-MoE": 30_532_122_624,
    "OLMoE": 6_919_161_856,
    "DeepSeek-V2": 15_706_484_224,
    "gpt-oss": 116_829_156_672,
    "Phi-MoE": 41_873_153_344,
    "DBRX": 131_596_523_520,
    "Qwen2-VL": 8_291_375_616,
    "Qwen2.5-VL": 8_292_166_656,
    "Qwen3-VL": 4_437_815_808,
    "Qwen3-VL-MoE": 31_070_754_032,
    "LLaVA": 7_063_427_072,
    "SmolVLM": 2_246_272_880,
    "Gemma 3": 4_300_079_472,
    "Llama 4": 108_641_793_536,
}


def row_of(page, family):
    """Return the cells of a family's row, without its name."""
    lines = (PAGES / f"{page}.md").read_text().splitlines()
    row = next(line for line in lines if line.startswith(f"| {family} |") and " B |" in line)
    return [cell.strip() for cell in row.strip("|").split("|")][1:]


@pytest.mark.parametrize("family", sweep(KEPT, soak=[family for family in FAMILIES if family not in KEPT]))
def test_a_row_has_the_fractions_of_a_familys_shapes(family):
    found = fractions_of(FAMILIES[family])
    expected = cells(FAMILIES[family], found)
    assert row_of(FAMILIES[family].page, family)[: len(expected)] == expected
    assert found.parameters == PUBLISHED.get(family, found.parameters)


def test_every_row_of_the_pages_is_computed():
    for page in ("mixtures", "vision", "speech"):
        text = (PAGES / f"{page}.md").read_text()
        table = text[text.index("| family | shapes of |") :].split("\n\n")[0]
        names = {line.strip("|").split("|")[0].strip() for line in table.splitlines()[2:]}
        assert names == {name for name, family in FAMILIES.items() if family.page == page}
