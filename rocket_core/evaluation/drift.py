"""Drift of models without predictions: the distance of a compressed model's pooled outputs from the dense model's."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rocket_core.errors import CheckpointError, EmptyCalibrationError, InvalidConfigError
from rocket_core.models.classes import reads_in_order
from rocket_core.models.pretrained import tokenize


def sentences(texts: Iterable[str]) -> Iterator[str]:
    """Return the non-empty lines of documents, stripped: the sentences that an encoder embeds."""
    return (line.strip() for text in texts for line in text.splitlines() if line.strip())


def masked_mean(
    states: Float[Tensor, "sentences tokens hidden"], mask: Int[Tensor, "sentences tokens"]
) -> Float[Tensor, "sentences hidden"]:
    """Return the mean of the states of tokens, without padding, in float32 or wider.

    Args:
        states: finite.
        mask: 1 for tokens, 0 for padding; each sentence has at least one token.
    """
    wide = states.to(torch.promote_types(states.dtype, torch.float32))
    weights = mask.to(wide.dtype).unsqueeze(-1)
    return (wide * weights).sum(1) / weights.sum(1)


def last_tokens(mask: Int[Tensor, "sentences tokens"]) -> Int[Tensor, "sentences tokens"]:
    """Return a mask of the last token of each sentence, which is followed by padding only.

    In a decoder it alone has read the whole sentence, and embeddings and scores are made from it.
    """
    return mask * (mask.cumsum(1) == mask.sum(1, keepdim=True))


def mean_cosine_drift(dense: Float[Tensor, "sentences hidden"], compressed: Float[Tensor, "sentences hidden"]) -> float:
    """Return the mean over sentences of 1 - cos(dense, compressed), in float64; from 0 to 2.

    Computed as ||u - v||² / 2 of the unit vectors, which loses no digits if both are nearly equal. A zero vector has
    no direction: its drift is 0 from another zero vector, and 1/2 from any other vector.
    """
    left, right = (torch.nn.functional.normalize(vectors.double(), dim=-1) for vectors in (dense, compressed))
    return min(2.0, float(((left - right) ** 2).sum(-1).mean() / 2))


def pooled_outputs(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    length: int,
    batch_size: int,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> tuple[Float[Tensor, "sentences hidden"], int]:
    """Return a vector for each sentence from the last hidden states: their masked mean; of a decoder, the last one.

    Args:
        model: an encoder or a decoder, with or without a head; in evaluation mode; not modified.
        tokenizer: its tokenizer, whose special tokens are added.
        texts: sentences; at least one.
        length: maximum tokens per sentence; longer sentences are truncated.
        batch_size: sentences per call of the model, >= 1.
        on_progress: called with (sentences done, total sentences) after each batch.

    Returns:
        One vector per sentence, on the CPU, and the number of tokens read.

    Raises:
        EmptyCalibrationError: `texts` is empty.
        InvalidConfigError: the model is in training mode.
        CheckpointError: the outputs are NaN or infinite.
    """
    if not texts:
        raise EmptyCalibrationError("the text holds no sentence; give one with at least one line of text")
    if model.training:
        raise InvalidConfigError("the model is in training mode, where dropout makes it random; call model.eval()")
    encoder: nn.Module = model.base_model
    in_order = reads_in_order(model.config)
    if tokenizer.pad_token is None:
        # Padding is masked, so that any token will do.
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    device = next(model.parameters()).device
    pooled: list[Tensor] = []
    tokens = 0
    for start in range(0, len(texts), batch_size):
        batch = list(texts[start : start + batch_size])
        options = {"truncation": True, "max_length": length, "padding": True, "padding_side": "right"}
        inputs = tokenize(tokenizer, batch, **options, return_tensors="pt").to(device)
        with torch.inference_mode():
            states = encoder(**inputs).last_hidden_state
        mask = inputs["attention_mask"]
        vectors = masked_mean(states, last_tokens(mask) if in_order else mask)
        if not bool(torch.isfinite(vectors).all()):
            raise CheckpointError(
                f"the model's outputs for sentences {start} to {start + len(batch) - 1} are not finite; its weights "
                f"are damaged, or {states.dtype} is too narrow for its activations"
            )
        pooled.append(vectors.cpu())
        tokens += int(mask.sum())
        on_progress(start + len(batch), len(texts))
    return torch.cat(pooled), tokens
