"""Whether a model can answer prompts, as far as its config.json tells. Loads no torch."""

from collections.abc import Mapping

from rocket_core.errors import InvalidConfigError
from rocket_core.inspection.footprint import positions
from rocket_core.inspection.preconditions import predicts_tokens


def check_prompts(config: Mapping[str, object], count: int, answer_tokens: int, model: str) -> None:
    """Raise an error if config.json shows that a model cannot answer prompts at the length that is asked for.

    How many tokens a prompt has is known only once the tokenizer is loaded; the run refuses one that is too long.

    Args:
        config: the content of config.json.
        count: number of prompts.
        answer_tokens: tokens of the longest answer.
        model: name of the model in messages.

    Raises:
        InvalidConfigError: the model is an encoder, or an answer leaves no room for a prompt.
    """
    if count == 0:
        return
    if not predicts_tokens(config):
        raise cannot_answer(model)
    longest = positions(config)
    if longest is not None and answer_tokens >= longest:
        raise InvalidConfigError(
            f"an answer of {answer_tokens} tokens leaves no room for a prompt in the {longest} positions of {model}; "
            "lower answer_tokens"
        )


def cannot_answer(model: str) -> InvalidConfigError:
    """Return the error for a model that answers no prompts."""
    return InvalidConfigError(f"{model} holds an encoder, which answers no prompts; leave prompts out")
