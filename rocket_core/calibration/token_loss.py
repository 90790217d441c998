"""The loss of a model that predicts tokens, and what it says of the text."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import nll_loss
from transformers import PretrainedConfig, PreTrainedModel

from rocket_core.models.block_calls import without_cache

_NO_TARGET = -100
# Token ids at the positions of the last list of blocks, by argument of the model.
_READ_BY_THE_LAST = ("decoder_input_ids", "input_ids")
_PLACEHOLDERS = ("image_token_id", "audio_token_id")


@dataclass(kw_only=True, slots=True)
class TextLoss:
    """Sums over the predicted tokens of a text.

    Attributes:
        tokens: number of predicted tokens.
        negative_log_likelihood: sum of their negative log-likelihoods, in nats.
        entropy: sum of the entropies of the distributions that they were predicted from: the negative log-likelihood
            that the model itself expects.
    """

    tokens: int = 0
    negative_log_likelihood: float = 0.0
    entropy: float = 0.0

    def add(self, other: "TextLoss") -> None:
        """Add the sums of another text."""
        self.tokens += other.tokens
        self.negative_log_likelihood += other.negative_log_likelihood
        self.entropy += other.entropy


def read_tokens(batch: Mapping[str, Tensor]) -> Int[Tensor, "windows tokens"] | None:
    """Return the token ids at the positions of a model's last list of blocks; None if it reads no text there.

    Args:
        batch: arguments of the model by name.
    """
    return next((batch[name] for name in _READ_BY_THE_LAST if name in batch), None)


def next_tokens(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> Int[Tensor, "windows tokens"]:
    """Return the token that follows each token; the last of a window has no target, nor one before a placeholder."""
    tokens = read_tokens(batch)
    assert tokens is not None, "a model that predicts tokens reads some"
    targets = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], _NO_TARGET)], dim=1)
    for placeholder in placeholder_ids(model.config):
        targets = targets.masked_fill(targets == placeholder, _NO_TARGET)
    return targets


def placeholder_ids(config: PretrainedConfig) -> frozenset[int]:
    """Return the ids of tokens that a model replaces by parts of an image or of audio."""
    found = (getattr(config, name, None) for name in _PLACEHOLDERS)
    return frozenset(int(token) for token in found if token is not None)


def negative_log_likelihood(
    model: PreTrainedModel,
    batch: Mapping[str, Tensor],
    targets: Int[Tensor, "windows tokens"],
    draws: Float[Tensor, "windows tokens"] | None,
    text: TextLoss,
) -> Float[Tensor, ""]:
    """Return the negative log-likelihood of the targets, or of tokens drawn from the model's predictions, summed.

    The expectation of the squared gradients of drawn tokens is the diagonal of the Fisher information of the
    predictions, which is the curvature of the KL divergence from them.

    Args:
        model: the model.
        batch: its arguments by name.
        targets: see `next_tokens`.
        draws: see `uniform_draws`; None takes the targets.
        text: sums to which those of the targets are added.
    """
    logits = model(**batch, **without_cache(model)).logits
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
    logarithms = wide.log_softmax(dim=-1)
    targets = targets.flatten()
    predicted = targets != _NO_TARGET
    probabilities = logarithms.detach().exp()
    text.add(
        TextLoss(
            tokens=int(predicted.sum()),
            negative_log_likelihood=float(_summed(logarithms.detach(), targets)),
            entropy=float(_entropies(logarithms.detach(), probabilities)[predicted].sum()),
        )
    )
    if draws is None:
        return _summed(logarithms, targets)
    sums = probabilities.cumsum(dim=-1)
    # Sums do not end at one exactly.
    places = draws.flatten()[:, None].to(sums) * sums[:, -1:]
    drawn = torch.searchsorted(sums, places)[:, 0].clamp_max(wide.shape[-1] - 1)
    return _summed(logarithms, torch.where(predicted, drawn, _NO_TARGET))


def _summed(logarithms: Float[Tensor, "n vocabulary"], targets: Int[Tensor, " n"]) -> Float[Tensor, ""]:
    """Return the negative log-likelihood of the targets."""
    return nll_loss(logarithms, targets, reduction="sum", ignore_index=_NO_TARGET)


def uniform_draws(tokens: Int[Tensor, "windows tokens"]) -> Float[Tensor, "windows tokens"]:
    """Return numbers from 0 to 1 on the CPU, by which predictions are drawn; they depend on the tokens of the window.

    So neither batches nor devices change them.
    """
    draws = torch.empty(tokens.shape)
    for window, own in zip(tokens.cpu().long(), draws, strict=True):
        own.copy_(torch.rand(len(own), generator=torch.Generator().manual_seed(zlib.crc32(window.numpy().tobytes()))))
    return draws


def _entropies(
    logarithms: Float[Tensor, "n vocabulary"], probabilities: Float[Tensor, "n vocabulary"]
) -> Float[Tensor, " n"]:
    """Return -Σ p log p, the entropy of each distribution in nats."""
    # A probability of zero has a logarithm of minus infinity, and adds nothing.
    return -(probabilities * logarithms.clamp_min(-1e9)).sum(dim=-1)


def cut_batch(batch: Mapping[str, Tensor], rows: slice, columns: slice) -> dict[str, Tensor]:
    """Return some samples of a batch; tokens that the last blocks read are cut to the given columns as well.

    Images next to such tokens are left out, as only what precedes the blocks reads them.
    """
    read = next((name for name in _READ_BY_THE_LAST if name in batch), None)
    if read == "input_ids":
        return {read: batch[read][rows, columns]}
    return {name: tensor[rows, columns] if name == read else tensor[rows] for name, tensor in batch.items()}
