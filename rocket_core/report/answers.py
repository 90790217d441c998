"""Answers of the original and the compressed model to the same prompts, as they appear in reports. Loads no torch."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, Field

from rocket_core.schema import FrozenModel

_Share = Annotated[float, Field(ge=0, le=1)]
# Nats of KL divergence from which a token is shown as a little, and as far, apart.
_LITTLE, _FAR = 0.01, 0.1
# Characters that are shown of a token, and of an answer: a tokenizer may have words of any length.
_MOST_OF_TOKEN, _MOST_OF_ANSWER = 256, 2**14


class AnswerToken(FrozenModel):
    """A token of the original's answer, with what both models predict after the same text."""

    text: str
    """its text; empty if it only begins a character, which then belongs to a later token. Cut after 256 characters, and
    after 16,384 of an answer.
    """
    before: _Share
    """probability that the original gives it, [0, 1]."""
    after: _Share
    """probability that the compressed model gives it, [0, 1]."""
    kl_divergence: Annotated[float, Field(ge=0)]
    """KL divergence of the compressed model's prediction at this token from the original's, in nats, at least 0."""


def _shortened(texts: Iterable[str]) -> Iterator[str]:
    left = _MOST_OF_ANSWER
    for text in texts:
        most = min(_MOST_OF_TOKEN, left)
        shown = text if len(text) <= most else f"{text[: most - 1]}…" if most else ""
        left -= len(shown)
        yield shown


def _shortened_tokens(tokens: tuple[AnswerToken, ...]) -> tuple[AnswerToken, ...]:
    texts = _shortened(token.text for token in tokens)
    return tuple(token.model_copy(update={"text": text}) for token, text in zip(tokens, texts, strict=True))


def _shortened_texts(texts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(_shortened(texts))


class ComparedAnswer(FrozenModel):
    """The answers of both models to one prompt, each token the most likely one."""

    prompt: str
    """the prompt."""
    is_chat: bool
    """whether it was sent as a user's message, by the chat template of the model; otherwise the models continue it."""
    before: Annotated[tuple[AnswerToken, ...], Field(min_length=1), AfterValidator(_shortened_tokens)]
    """the original's answer."""
    after: Annotated[tuple[str, ...], Field(min_length=1), AfterValidator(_shortened_texts)]
    """texts of the tokens of the compressed model's answer, cut as well."""
    first_difference: Annotated[int, Field(ge=0)] | None
    """index of the first token that differs; the length of the shorter answer if the other only continues it, None if
    both answers are the same.
    """

    @property
    def kl_divergence(self) -> float:
        """KL divergence over the original's answer, mean over its tokens, in nats."""
        return sum(token.kl_divergence for token in self.before) / len(self.before)

    @property
    def summary(self) -> str:
        """Where the answers part, and how far the predictions are apart."""
        shared = len(self.before) if self.first_difference is None else self.first_difference
        words = "the same answer" if self.first_difference is None else f"the same first {shared} tokens"
        if self.first_difference == 0:
            words = "different from the first token"
        return f"{words}; KL divergence over the original's answer {self.kl_divergence:.4f} nats per token"


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A token as it is shown.

    Attributes:
        text: its text.
        distance: how far the predictions are apart: 0 for hardly, 1 a little, 2 far; of the original's answer only.
        is_first_difference: whether the answers part here.
        note: the figures for that; empty in the compressed model's answer.
    """

    text: str
    distance: int = 0
    is_first_difference: bool = False
    note: str = ""


def pieces_before(answer: ComparedAnswer) -> Iterator[Piece]:
    """Yield the tokens of the original's answer."""
    for index, token in enumerate(answer.before):
        yield Piece(
            text=token.text,
            distance=(token.kl_divergence >= _LITTLE) + (token.kl_divergence >= _FAR),
            is_first_difference=index == answer.first_difference,
            note=f"probability {token.before:.3f} → {token.after:.3f}, KL divergence {token.kl_divergence:.4f} nats",
        )


def pieces_after(answer: ComparedAnswer) -> Iterator[Piece]:
    """Yield the tokens of the compressed model's answer."""
    for index, text in enumerate(answer.after):
        yield Piece(text=text, is_first_difference=index == answer.first_difference)
