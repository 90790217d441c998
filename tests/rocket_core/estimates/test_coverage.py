import pytest

from rocket_core.config import compression_config
from rocket_core.estimates.coverage import coverage

PARTS = {"selected": 400, "tables": 300, "tower": 200, "ignored": 0}


def of(settings, **parts):
    return coverage(compression_config(**settings), 1000, **(PARTS | parts))


def test_below_a_half_it_says_what_would_select_more():
    found = of({"ratio": 0.3})
    assert found.fraction == 0.4
    assert found.warning == (
        "only 40 % of the model's bytes are selected to be compressed, and the rest stays as it is; to select more: "
        "include vision, with images to calibrate on (20 % more); a size, or budget bytes and include embeddings "
        "(30 % more)"
    )


@pytest.mark.parametrize(
    ("settings", "fraction", "hows"),
    [
        ({"target_bytes": 500}, 0.7, ["include vision, with images to calibrate on"]),
        ({"target_bytes": 500, "include": []}, 0.4, ["include vision, with images to calibrate on", "include embed"]),
        ({"bits": 4}, 0.4, ["include vision, with images to calibrate on", "include embeddings"]),
        ({"ratio": 0.3, "budget": "bytes", "include": ["embeddings"]}, 0.7, ["include vision"]),
        ({"ratio": 0.3, "include": ["vision"]}, 0.4, ["a size, or budget bytes and include embeddings"]),
        ({"bits": 4.6, "engine": "vllm"}, 0.4, ["include vision"]),
    ],
)
def test_what_is_included_depends_on_the_settings(settings, fraction, hows):
    found = of(settings)
    assert found.fraction == fraction
    assert len(found.more) == len(hows)
    assert all(part.how.startswith(how) for part, how in zip(found.more, hows, strict=True))


def test_ignored_layers_are_named():
    assert "; fewer ignored layers (45 % more)" in of({"ratio": 0.3, "ignore": ["*"]}, ignored=450).warning


def test_at_a_half_there_is_no_warning():
    assert of({"ratio": 0.3}, selected=500).warning is None
    assert of({"ratio": 0.3}, selected=499).warning is not None


def test_it_says_if_nothing_else_can_be_compressed():
    assert of({"ratio": 0.3}, tables=0, tower=0).warning.endswith("nothing else of it can be compressed")
