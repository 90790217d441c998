"""Answers of the original and the compressed model, as commands show them."""

from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from rocket_core.report.answers import ComparedAnswer, Piece, pieces_after, pieces_before

# Before the first token that differs: visible without colours as well.
_PARTING = "▶"
_STYLES = ("", "yellow", "bold red")


def print_answers(console: Console, answers: Iterable[ComparedAnswer]) -> None:
    """Write answers to prompts, with the place where they part, and in the original's answer how far predictions do."""
    for answer in answers:
        console.print()
        console.print(Text(_shown(f"Prompt: {answer.prompt}"), style="bold"))
        for name, pieces in (("original", pieces_before(answer)), ("compressed", pieces_after(answer))):
            console.print(Text(f"{name}:", style="dim"))
            console.print(_text(pieces))
        console.print(Text(answer.summary, style="dim"))


def _text(pieces: Iterable[Piece]) -> Text:
    text = Text()
    for piece in pieces:
        mark = _PARTING if piece.is_first_difference else ""
        text.append(mark + _shown(piece.text), _STYLES[piece.distance])
    return text


def _shown(text: str) -> str:
    """Return a text without the control characters that a terminal would obey."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "\ufffd" for letter in text)
