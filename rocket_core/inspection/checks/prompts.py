"""Whether a model can answer prompts, as far as its config.json and tokenizer.json tell. Loads no torch."""

from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from rocket_core.errors import CheckpointFormatError, InvalidConfigError
from rocket_core.inspection.headers.model_fields import positions, predicts_tokens
from rocket_core.system.time_limit import time_limit

TOKENIZER_NAME = "tokenizer.json"
# Larger than those of vocabularies of 256,000 tokens.
_MAX_TOKENIZER_BYTES = 2**26
_SECONDS = 30.0
_ADVICE = "replace it by the original"


def check_prompts(config: Mapping[str, object], prompts: Sequence[str], answer_tokens: int, model: str) -> None:
    """Raise an error if config.json shows that a model cannot answer prompts at the length that is asked for.

    How many tokens a prompt has is known only with the tokenizer: see `check_prompt_lengths`.

    Args:
        config: the content of config.json.
        prompts: the prompts.
        answer_tokens: tokens of the longest answer.
        model: name of the model in messages.

    Raises:
        InvalidConfigError: the model is an encoder, a prompt is empty, or an answer leaves no room for a prompt.
    """
    if not prompts:
        return
    if not predicts_tokens(config):
        raise cannot_answer(model)
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            raise InvalidConfigError(f"prompt {number} is empty; give it some text, or leave it out")
    longest = positions(config)
    if longest is not None and answer_tokens >= longest:
        raise InvalidConfigError(
            f"an answer of {answer_tokens} tokens leaves no room for a prompt in the {longest} positions of {model}; "
            "lower answer_tokens"
        )


def check_prompt_lengths(
    config: Mapping[str, object], prompts: Sequence[str], answer_tokens: int, folder: Path, model: str
) -> None:
    """Raise an error if a prompt is certain to leave no room for an answer.

    Counts the tokens of the text alone, to which a chat template adds. Nothing is judged if the model has unlimited
    positions, if the folder has no tokenizer.json that can be read, or if the package `tokenizers` is not installed;
    the run itself counts with the model's own tokenizer.

    Args:
        config: the content of config.json.
        prompts: the prompts.
        answer_tokens: tokens of the longest answer.
        folder: the model's folder.
        model: name of the model in messages.

    Raises:
        InvalidConfigError: a prompt and its answer have more tokens than the model has positions.
        CheckpointFormatError: the tokenizer does not return in time.
    """
    longest, file = positions(config), folder / TOKENIZER_NAME
    if not prompts or longest is None or find_spec("tokenizers") is None:
        return
    if not file.is_file() or file.stat().st_size > _MAX_TOKENIZER_BYTES:
        return
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception:  # noqa: BLE001  # the library raises nothing more specific; the run reports a damaged file
        return
    for number, prompt in enumerate(prompts, 1):
        with time_limit(_SECONDS, CheckpointFormatError(f"{file} takes too much processor time; {_ADVICE}")):
            count = len(tokenizer.encode(prompt.strip(), add_special_tokens=False))
        if count + answer_tokens > longest:
            raise too_long(number, count, answer_tokens, longest, model)


def too_long(number: int, count: int, answer_tokens: int, longest: int, model: str) -> InvalidConfigError:
    """Return the error for a prompt, counted from 1, that leaves no room for an answer."""
    return InvalidConfigError(
        f"prompt {number} has {count} tokens, and an answer of {answer_tokens} does not fit into the {longest} "
        f"positions of {model}; shorten the prompt or lower answer_tokens"
    )


def check_tasks(config: Mapping[str, object], tasks: Collection[str], model: str) -> None:
    """Raise an error if zero-shot tasks are asked of a model that cannot be scored by them.

    Args:
        config: the content of config.json.
        tasks: names of the tasks.
        model: name of the model in messages.

    Raises:
        InvalidConfigError: the model predicts no tokens.
    """
    if tasks and not predicts_tokens(config):
        raise cannot_score(model)


def cannot_score(model: str) -> InvalidConfigError:
    """Return the error for a model that zero-shot tasks cannot score."""
    return InvalidConfigError(f"{model} predicts no tokens, which zero-shot tasks score; leave tasks out")


def check_loss_bounds(config: Mapping[str, object], bounds: str | None, model: str) -> None:
    """Raise an error if a target or a verdict is about figures that a model has none of.

    Args:
        config: the content of config.json.
        bounds: see `CompressionConfig.loss_bounds`.
        model: name of the model in messages.

    Raises:
        InvalidConfigError: the model predicts no tokens.
    """
    if bounds is not None and not predicts_tokens(config):
        raise cannot_judge(model, bounds)


def cannot_judge(model: str, bounds: str) -> InvalidConfigError:
    """Return the error for a model that bounds on its predictions cannot judge."""
    return InvalidConfigError(f"{model} predicts no tokens, which {bounds} is about; leave {bounds} out")


def cannot_answer(model: str) -> InvalidConfigError:
    """Return the error for a model that answers no prompts."""
    return InvalidConfigError(f"{model} predicts no tokens and answers no prompts; leave prompts out")
