"""Answers of a dense and a compressed model to the same prompts, compared token by token.

Each model answers greedily on its own. Both then predict the tokens of the dense model's answer, so that their
predictions are of the same tokens after the same text.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.stopping_criteria import StoppingCriteria

from rocket_core.errors import CheckpointFormatError, InvalidConfigError
from rocket_core.evaluation.divergence import divergence_per_token
from rocket_core.evaluation.models import ModelFolder, check_token_ids
from rocket_core.evaluation.windows import Prediction, predictions
from rocket_core.inspection.checks.prompts import cannot_answer, too_long
from rocket_core.inspection.headers.model_fields import positions
from rocket_core.models.pretrained import TEMPLATE_SECONDS, interpreting, tokenize, using
from rocket_core.report.answers import AnswerToken, ComparedAnswer

# What a tokenizer returns for a part of a character.
_PARTIAL = "\ufffd"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A text that both models answer.

    Attributes:
        text: the text as given.
        is_chat: whether the tokens are those of a user's message, by the model's chat template.
        tokens: what the models read, at least one token.
    """

    text: str
    is_chat: bool
    tokens: Int64[Tensor, " tokens"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseAnswers:
    """The dense model's answers.

    Attributes:
        tokens: the answer to each prompt, at least one token each.
        stops: tokens that end an answer.
    """

    tokens: tuple[Int64[Tensor, " tokens"], ...]
    stops: tuple[int, ...]


def read_prompts(folder: ModelFolder, texts: Sequence[str], answer_tokens: int) -> tuple[Prompt, ...]:
    """Tokenize prompts: as a user's message if the model has a chat template, otherwise as a text to continue.

    Args:
        folder: the dense model.
        texts: the prompts.
        answer_tokens: tokens of the longest answer.

    Raises:
        InvalidConfigError: the model predicts no tokens, or a prompt has no tokens or leaves no room for an answer.
        CheckpointFormatError: the chat template cannot be used.
    """
    if texts and not folder.predicts_tokens:
        raise cannot_answer(str(folder.path))
    prompts = tuple(_read_prompt(folder, text) for text in texts)
    longest = positions(folder.config.to_dict())
    for number, prompt in enumerate(prompts, 1):
        if len(prompt.tokens) == 0:
            raise InvalidConfigError(f"prompt {number} has no tokens; give it some text")
        if longest is not None and len(prompt.tokens) + answer_tokens > longest:
            raise too_long(number, len(prompt.tokens), answer_tokens, longest, "the model")
    return prompts


def _read_prompt(folder: ModelFolder, text: str) -> Prompt:
    tokenizer: Any = folder.tokenizer
    is_chat = tokenizer.chat_template is not None
    if is_chat:
        message = [{"role": "user", "content": text}]
        with interpreting(f"the chat template of {folder.path}", CheckpointFormatError, seconds=TEMPLATE_SECONDS):
            ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"]
    else:
        ids = tokenize(tokenizer, text)["input_ids"]
    return Prompt(text=text, is_chat=is_chat, tokens=torch.tensor(ids, dtype=torch.int64))


def answer_densely(
    folder: ModelFolder,
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    answer_tokens: int,
    *,
    on_token: Callable[[], None],
    on_prediction: Callable[[Prediction], None],
) -> DenseAnswers:
    """Answer prompts with the dense model.

    Args:
        folder: the model's folder.
        model: on its device.
        prompts: the prompts.
        answer_tokens: tokens of the longest answer.
        on_token: called for every token.
        on_prediction: called with the predictions of each answer's tokens, numbered from 0.
    """
    check_token_ids(folder, model, max((int(prompt.tokens.max()) for prompt in prompts), default=0))
    stops = _stop_tokens(model)
    answers = []
    for number, prompt in enumerate(prompts):
        answer = greedy_answer(model, prompt.tokens, count=answer_tokens, stops=stops, on_token=on_token)
        on_prediction(Prediction(window=number, logits=_logits(model, prompt, answer), targets=answer))
        answers.append(answer)
    return DenseAnswers(tokens=tuple(answers), stops=stops)


def compare_answers(
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    dense: DenseAnswers,
    answer_tokens: int,
    *,
    on_token: Callable[[], None],
    take_dense: Callable[[Prediction], Float[Tensor, "tokens vocabulary"]],
) -> tuple[ComparedAnswer, ...]:
    """Answer prompts with the compressed model, and compare with the dense model's answers.

    Args:
        tokenizer: the tokenizer of both models.
        model: the compressed model, on its device.
        prompts: the prompts.
        dense: the dense model's answers.
        answer_tokens: tokens of the longest answer.
        on_token: called for every token.
        take_dense: returns the dense model's logits for the same tokens.
    """
    compared = []
    for number, (prompt, expected) in enumerate(zip(prompts, dense.tokens, strict=True)):
        answer = greedy_answer(model, prompt.tokens, count=answer_tokens, stops=dense.stops, on_token=on_token)
        predicted = Prediction(window=number, logits=_logits(model, prompt, expected), targets=expected)
        compared.append(
            ComparedAnswer(
                prompt=prompt.text,
                is_chat=prompt.is_chat,
                before=_compared_tokens(
                    token_texts(tokenizer, prompt.tokens, expected), expected, take_dense(predicted), predicted.logits
                ),
                after=tuple(token_texts(tokenizer, prompt.tokens, answer)),
                first_difference=first_difference(expected, answer),
            )
        )
    return tuple(compared)


def greedy_answer(
    model: PreTrainedModel,
    prompt: Int64[Tensor, " prompt"],
    *,
    count: int,
    stops: Sequence[int],
    on_token: Callable[[], None] = lambda: None,
) -> Int64[Tensor, " tokens"]:
    """Generate an answer of the most likely token each time, whatever settings of sampling the model's folder has.

    Args:
        model: the model.
        prompt: what it reads, at least one token.
        count: tokens of the longest answer, at least 1.
        stops: tokens that end the answer, of which they are the last token.
        on_token: called for every token; may raise to stop.

    Returns:
        The tokens of the answer, on the CPU; at least one.
    """
    # Penalties and the like in the folder would apply otherwise.
    model.generation_config = GenerationConfig()
    settings = GenerationConfig(
        max_new_tokens=count, do_sample=False, num_beams=1, eos_token_id=list(stops) or None, pad_token_id=0
    )
    ids = prompt[None].to(model.device)
    with warnings.catch_warnings():
        # About settings of sampling in the folder, which are not used.
        warnings.simplefilter("ignore")
        generated: Any = cast("Any", model).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=settings,
            stopping_criteria=[_EveryToken(on_token)],
        )
    answer: Tensor = generated[0, len(prompt) :].cpu()
    return answer


def first_difference(one: Int64[Tensor, " one"], other: Int64[Tensor, " other"]) -> int | None:
    """Return the index of the first token that differs; the shorter length if one continues the other."""
    common = min(len(one), len(other))
    different = (one[:common] != other[:common]).nonzero()
    if len(different):
        return int(different[0])
    return None if len(one) == len(other) else common


def token_texts(
    tokenizer: PreTrainedTokenizerBase, prompt: Int64[Tensor, " prompt"], answer: Int64[Tensor, " tokens"]
) -> list[str]:
    """Return the text of each token of an answer; together they are the text of the answer.

    A character of several tokens belongs to the last of them. The character 0 is shown as one that cannot be shown.
    """

    def text_of(count: int) -> str:
        ids = [*prompt.tolist(), *answer[:count].tolist()]
        return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    with using(tokenizer, 0):
        texts, known = [], text_of(0)
        for count in range(1, len(answer) + 1):
            text = text_of(count)
            is_partial = text.endswith(_PARTIAL) and count < len(answer)
            texts.append("" if is_partial else text[len(known) :].replace("\0", _PARTIAL))
            known = known if is_partial else text
    return texts


class _EveryToken(StoppingCriteria):
    """Calls a function for every token, and stops nothing."""

    def __init__(self, on_token: Callable[[], None]) -> None:
        self._on_token = on_token

    def __call__(self, input_ids: Tensor, scores: Tensor | None, **_more: Any) -> Bool[Tensor, " batch"]:
        del scores
        self._on_token()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _stop_tokens(model: PreTrainedModel) -> tuple[int, ...]:
    settings: Any = model.generation_config
    stops = None if settings is None else settings.eos_token_id
    return () if stops is None else tuple(stops) if isinstance(stops, list | tuple) else (int(stops),)


def _logits(
    model: PreTrainedModel, prompt: Prompt, answer: Int64[Tensor, " tokens"]
) -> Float[Tensor, "tokens vocabulary"]:
    read = torch.cat([prompt.tokens, answer])
    [prediction] = predictions(model, read[None], stride=len(read), batch_size=1)
    return prediction.logits[-len(answer) :]


def _compared_tokens(
    texts: Sequence[str],
    tokens: Int64[Tensor, " tokens"],
    dense: Float[Tensor, "tokens vocabulary"],
    compressed: Float[Tensor, "tokens vocabulary"],
) -> tuple[AnswerToken, ...]:
    before, after = _probabilities(dense, tokens), _probabilities(compressed, tokens)
    divergences = divergence_per_token(dense, compressed).tolist()
    return tuple(
        # Rounding may leave the divergence of nearly equal distributions slightly below 0, and a share above 1.
        AnswerToken(text=text, before=min(1.0, one), after=min(1.0, other), kl_divergence=max(0.0, divergence))
        for text, one, other, divergence in zip(texts, before, after, divergences, strict=True)
    )


def _probabilities(logits: Float[Tensor, "tokens vocabulary"], tokens: Int64[Tensor, " tokens"]) -> list[float]:
    chosen = logits.double().softmax(-1).gather(-1, tokens.to(logits.device)[:, None])
    return [float(share) for share in chosen[:, 0]]
