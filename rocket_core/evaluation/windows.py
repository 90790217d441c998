"""Windows of tokens for evaluation, and a model's predictions of them."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from rocket_core.calibration.datasets import token_windows
from rocket_core.errors import CheckpointError, EmptyCalibrationError, InvalidConfigError
from rocket_core.estimates.healing import batch_windows


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """A model's predictions of the tokens that are counted in one window.

    Attributes:
        window: index of the window.
        logits: prediction of each counted token from those before it; in the model's dtype, on its device.
        targets: the counted tokens.
    """

    window: int
    logits: Float[Tensor, "tokens vocabulary"]
    targets: Int64[Tensor, " tokens"]


def text_windows(
    texts: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    count: int | None,
    length: int,
    stride: int | None = None,
) -> Int64[Tensor, "windows length"]:
    """Cut the concatenated tokens of documents into windows that may overlap.

    Documents are joined as in `rocket_core.calibration.datasets.token_windows`; tokens after the last full window are
    dropped.

    Args:
        texts: documents; read no further than needed.
        tokenizer: the model's tokenizer.
        count: number of windows, at least 1; None takes all.
        length: tokens per window, at least 2.
        stride: tokens from the start of one window to the next, from 1 to `length`; None is `length`: no overlap.

    Returns:
        At most `count` windows on the CPU; fewer if the documents run out.

    Raises:
        InvalidConfigError: the stride is out of range.
        EmptyCalibrationError: the text does not fill one window.
    """
    step = checked_stride(stride, length)
    token_count = None if count is None else length + (count - 1) * step
    tokens = token_windows(texts, tokenizer, count=token_count, length=1).flatten()
    if len(tokens) < length:
        raise EmptyCalibrationError(
            f"the text has {len(tokens)} tokens, one window needs {length}; give more text or a shorter sequence length"
        )
    return tokens.unfold(0, length, step)


def checked_stride(stride: int | None, length: int) -> int:
    """Return the stride for windows of `length` tokens; None is `length`.

    Raises:
        InvalidConfigError: the stride is less than 1, or skips tokens between windows.
    """
    if stride is None:
        return length
    if not 1 <= stride <= length:
        raise InvalidConfigError(
            f"stride is {stride}; it is from 1 to the sequence length, {length}, or tokens would be left out"
        )
    return stride


def counted_tokens(windows: int, length: int, stride: int) -> int:
    """Return the number of predicted tokens: all but the first of the first window, and the new ones of each later.

    If windows do not overlap, the first token of each has no context and is not predicted.
    """
    return length - 1 + (windows - 1) * min(stride, length - 1)


def predictions(
    model: nn.Module,
    windows: Int64[Tensor, "windows length"],
    *,
    stride: int,
    batch_size: int,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Iterator[Prediction]:
    """Yield a causal language model's predictions of the tokens of windows, each token once.

    Args:
        model: called as `model(input_ids=..., use_cache=False).logits`; in evaluation mode; not modified.
        windows: token ids, on any device; each window starts `stride` tokens after the previous one.
        stride: from 1 to the windows' length.
        batch_size: windows per call of the model, at least 1.
        on_progress: called with (windows done, total windows) after each batch.

    Yields:
        The predictions of each window, in order.

    Raises:
        InvalidConfigError: the model is in training mode, or the windows have no token to predict.
        CheckpointError: the model's logits are NaN or infinite.
    """
    count, length = windows.shape
    if model.training:
        raise InvalidConfigError(
            "the model is in training mode, where dropout makes perplexity random; call model.eval()"
        )
    if count == 0 or length < 2 or batch_size < 1:
        raise InvalidConfigError(
            f"perplexity needs at least one window of two tokens and a batch of one; got {count} windows of {length} "
            f"tokens in batches of {batch_size}"
        )
    device = next(model.parameters()).device
    new = min(stride, length - 1)
    for start in range(0, count, batch_size):
        batch = windows[start : start + batch_size].to(device)
        with torch.inference_mode():
            logits = model(input_ids=batch, use_cache=False).logits
        for row in range(len(batch)):
            counted = length - 1 if start + row == 0 else new
            predicted = logits[row, length - 1 - counted : -1]
            _check_finite(predicted, start + row)
            targets = batch[row, length - counted :].to(predicted.device)
            yield Prediction(window=start + row, logits=predicted, targets=targets)
        on_progress(min(start + batch_size, count), count)


def batch_size(config: PreTrainedConfig, length: int) -> int:
    """Return how many windows keep the logits, by far the largest activation, within a fixed size."""
    return batch_windows(int(config.get_text_config().vocab_size), length)


def copied_bytes(device: torch.device) -> int:
    """Return how large copies of logits in a wider dtype should be.

    On CPUs, copies that stay in the cache take a third to a half of the time of larger ones, for which memory is
    fetched from the system each time (1,023 tokens, 49,152 words). Accelerators are faster with few large operations.
    """
    return 2**22 if device.type == "cpu" else 3 * 2**26


def _check_finite(logits: Tensor, window: int) -> None:
    # NaN is both the least and the largest. `isfinite` of every logit takes 40 times as long.
    if not bool(torch.isfinite(torch.stack(torch.aminmax(logits))).all()):
        raise CheckpointError(
            f"the model's logits for window {window} are not finite; its weights are damaged, or {logits.dtype} is too "
            "narrow for its activations"
        )
