"""`rocket heal`: amounts of tokens, and problems that are found at once."""

from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from rocket_cli.options import read_tokens


def test_tokens_may_have_a_suffix() -> None:
    assert read_tokens("500k") == 500_000


def test_other_amounts_of_tokens_are_refused() -> None:
    with pytest.raises(typer.BadParameter, match="500k, 2M"):
        read_tokens("2MB")


def test_a_folder_without_an_artifact_is_an_error(rocket: Callable, tmp_path: Path) -> None:
    outcome = rocket("heal", tmp_path, tmp_path / "out", "--no-energy")

    assert outcome.code == 3
    assert "holds no artifact" in outcome.err


def test_unknown_text_is_found_before_work_starts(rocket: Callable, tmp_path: Path) -> None:
    outcome = rocket("heal", tmp_path, tmp_path / "out", "--calibration", "wikitext3")

    assert outcome.code == 3
    assert "Did you mean 'wikitext2'" in outcome.err
