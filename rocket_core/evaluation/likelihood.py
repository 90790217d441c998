"""Perplexity of causal language models."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from rocket_core.evaluation.windows import Prediction, checked_stride, copied_bytes, counted_tokens, predictions

# Logits in the wider dtype, and their log-softmax.
_COPIES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class PerplexityResult:
    """The perplexity of a model on windows of tokens.

    Attributes:
        perplexity: exp of `negative_log_likelihood`; infinity on overflow (above about 709).
        negative_log_likelihood: mean over predicted tokens, in nats.
        tokens: predicted tokens, each counted once; see `counted_tokens`.
        windows: number of windows.
    """

    perplexity: float
    negative_log_likelihood: float
    tokens: int
    windows: int


def perplexity(
    model: nn.Module,
    windows: Int64[Tensor, "windows length"],
    *,
    batch_size: int,
    stride: int | None = None,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> PerplexityResult:
    """Compute the perplexity of a causal language model on windows of tokens.

    Computes exp(-1/N Σ log p(tᵢ | tokens before it in its window)) over N tokens. If windows overlap, each token is
    predicted in the first window that contains it, so that every token but the first window's first counts once and,
    after the first window, has at least `length - stride` tokens before it. Log-softmax is computed in float32, or in
    the dtype of the logits if that is wider; sums are float64.

    Args:
        model: called as `model(input_ids=..., use_cache=False).logits`; in evaluation mode; not modified.
        windows: token ids, on any device; at least one window of at least two tokens.
        batch_size: windows per call of the model, >= 1.
        stride: tokens from the start of one window to the next, from 1 to `length`; None is `length`: windows do not
            overlap, and their first tokens are not predicted.
        on_progress: called with (windows done, total windows) after each batch.

    Returns:
        The perplexity and the counts that it was averaged over.

    Raises:
        InvalidConfigError: the model is in training mode, the stride is out of range, or the windows have no token to
            predict.
        CheckpointError: the model's logits are NaN or infinite.
    """
    count, length = windows.shape
    step = checked_stride(stride, length)
    predicted = predictions(model, windows, stride=step, batch_size=batch_size, on_progress=on_progress)
    total = math.fsum(surprise(prediction) for prediction in predicted)
    return summarize_likelihood(total, counted_tokens(count, length, step), count)


def surprise(prediction: Prediction) -> float:
    """Return the negative log-likelihood of a window's counted tokens, in nats; upcasts few of them at a time."""
    logits, targets = prediction.logits, prediction.targets
    wide = torch.promote_types(logits.dtype, torch.float32)
    size = max(1, copied_bytes(logits.device) // (_COPIES * wide.itemsize * logits.shape[1]))
    found = [
        cross_entropy(some.to(wide), words, reduction="none").double()
        for some, words in zip(torch.split(logits, size), torch.split(targets, size), strict=True)
    ]
    return float(torch.cat(found).sum())


def summarize_likelihood(total: float, tokens: int, windows: int) -> PerplexityResult:
    """Return the result for a sum of negative log-likelihoods."""
    mean = total / tokens
    try:
        value = math.exp(mean)
    except OverflowError:
        value = math.inf
    return PerplexityResult(perplexity=value, negative_log_likelihood=mean, tokens=tokens, windows=windows)
