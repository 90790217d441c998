"""`rocket heal`: amounts of tokens, and problems that are found at once."""

from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from rocket_cli.options import _tokens


@pytest.mark.parametrize(
    ("text", "tokens"), [("1", 1), ("500k", 500_000), ("2M", 2_000_000), ("1.5M", 1_500_000), ("1G", 10**9)]
)
def test_tokens_may_have_a_suffix(text: str, tokens: int) -> None:
    assert _tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "M", "0", "-2M", "0.5", "2MB", "nan", "inf", "two"])
def test_other_amounts_of_tokens_are_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="500k, 2M"):
        _tokens(text)


def test_a_folder_without_an_artifact_is_an_error(rocket: Callable, tmp_path: Path) -> None:
    outcome = rocket("heal", tmp_path, tmp_path / "out", "--no-energy")

    assert outcome.code == 3
    assert "holds no artifact" in outcome.err


def test_unknown_text_is_found_before_work_starts(rocket: Callable, tmp_path: Path) -> None:
    outcome = rocket("heal", tmp_path, tmp_path / "out", "--calibration", "wikitext3")

    assert outcome.code == 3
    assert "Did you mean 'wikitext2'" in outcome.err
