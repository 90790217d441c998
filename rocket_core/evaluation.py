"""Perplexity: how well a model, dense or compressed, predicts a text.

A compressed folder loads where `rocket_core.hf` was imported before; this module does not import it, as it lies above.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import torch
from jaxtyping import Int64
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME

from rocket_core.architectures import window_length
from rocket_core.datasets import LOCAL_SUFFIXES, file_documents, token_windows
from rocket_core.devices import resolve_device
from rocket_core.errors import (
    CheckpointError,
    CheckpointFormatError,
    CorruptCheckpointError,
    InvalidConfigError,
    ModelNotFoundError,
    UnsupportedArchitectureError,
)

_LOGIT_BYTES_PER_BATCH = 256 * 2**20
_LARGEST_BATCH = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class PerplexityResult:
    """How surprised a model is by windows of tokens.

    Attributes:
        perplexity: exp of `negative_log_likelihood`; infinity where that exceeds what a float holds (about 709).
        negative_log_likelihood: mean over predicted tokens, in nats.
        tokens: predicted tokens: all but the first of each window.
        windows: number of windows.
    """

    perplexity: float
    negative_log_likelihood: float
    tokens: int
    windows: int


class EvaluationResult(BaseModel):
    """The perplexity of a model on a text, with what is needed to repeat the measurement.

    Attributes:
        model: the folder.
        text: the text file as asked for.
        sequence_length: tokens per window.
        windows: number of windows.
        tokens: predicted tokens.
        negative_log_likelihood: mean over predicted tokens, in nats.
        perplexity: exp of it; infinity (null in JSON) where a float cannot hold it.
        device: where the model ran.
        dtype: dtype in which the model ran.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    text: str
    sequence_length: Annotated[int, Field(ge=2)]
    windows: Annotated[int, Field(ge=1)]
    tokens: Annotated[int, Field(ge=1)]
    negative_log_likelihood: float
    perplexity: float
    device: str
    dtype: str


def _ignore_progress(done: int, total: int) -> None:
    """Default of `on_progress`."""


def perplexity(
    model: nn.Module,
    windows: Int64[Tensor, "windows length"],
    *,
    batch_size: int,
    on_progress: Callable[[int, int], None] = _ignore_progress,
) -> PerplexityResult:
    """Perplexity of a causal language model on windows of tokens, each read by itself.

    Computes exp(-1/N Σ log p(tᵢ | t₁ … tᵢ₋₁)) over the N tokens that have a predecessor in their window. Log-softmax
    is taken in float32, or in the dtype of the logits if that is wider; sums are float64.

    Args:
        model: called as `model(input_ids=..., use_cache=False).logits`; in evaluation mode; not modified.
        windows: token ids, on any device; at least one window of at least two tokens.
        batch_size: windows per call of the model, >= 1.
        on_progress: called with (windows done, windows in all) after each batch.

    Returns:
        Perplexity and what it was averaged over.

    Raises:
        InvalidConfigError: the model is in training mode, or there is no token to predict.
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
    total = 0.0
    for start in range(0, count, batch_size):
        batch = windows[start : start + batch_size].to(device)
        with torch.inference_mode():
            logits = model(input_ids=batch, use_cache=False).logits[:, :-1]
            for row, (predicted, targets) in enumerate(zip(logits, batch[:, 1:], strict=True)):
                total += _window_nll(predicted, targets, window=start + row)
        on_progress(min(start + batch_size, count), count)
    tokens = count * (length - 1)
    mean = total / tokens
    return PerplexityResult(perplexity=_exp(mean), negative_log_likelihood=mean, tokens=tokens, windows=count)


def _window_nll(logits: Tensor, targets: Tensor, *, window: int) -> float:
    """Negative log-likelihood of one window; one at a time, so that only one is ever cast up."""
    if not bool(torch.isfinite(logits).all()):
        raise CheckpointError(
            f"the model's logits for window {window} are not finite; its weights are damaged, or {logits.dtype} is too "
            "narrow for its activations"
        )
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return float(cross_entropy(wide, targets.to(wide.device), reduction="none").double().sum())


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def evaluate_text(
    folder: Path,
    text: Path,
    *,
    sequence_length: int | None = None,
    limit: int | None = None,
    device: str = "auto",
    on_progress: Callable[[int, int], None] = _ignore_progress,
) -> EvaluationResult:
    """Perplexity of a model folder, dense or compressed, on a text file.

    The documents of the file are joined by the tokenizer's BOS token and cut into consecutive windows; tokens left over
    at the end are dropped. Compressed folders need `import rocket_core.hf` beforehand. No code of the folder is run,
    and weights are read from safetensors only.

    Args:
        folder: the model with its tokenizer; `rocket_core.checkpoint.find_model` gives that of a repository.
        text: `.txt` (one document) or `.jsonl` with `{"text": ...}` lines.
        sequence_length: tokens per window, from 2 to the model's positions; None takes 1024 or the model's positions,
            whichever is less.
        limit: how many windows to read from the beginning, >= 1; None reads all.
        device: torch device, or `auto`: the accelerator if there is one.
        on_progress: called with (windows done, windows in all) after each batch.

    Returns:
        The perplexity, with the settings that gave it.

    Raises:
        InvalidConfigError: a setting is out of range.
        CalibrationError: the text is malformed, or shorter than one window.
        UnknownDatasetError: the text cannot be read.
        ModelNotFoundError: no model in this folder.
        UnsupportedArchitectureError: not a causal language model that `transformers` loads.
        CheckpointError: weights are missing, damaged or give non-finite logits.
    """
    if limit is not None and limit < 1:
        raise InvalidConfigError(f"limit is {limit}; it is a number of windows, at least 1")
    if text.suffix.lower() not in LOCAL_SUFFIXES:
        raise InvalidConfigError(f"{text} is neither a {' nor a '.join(LOCAL_SUFFIXES)} file; rename or convert it")
    target = resolve_device(device)
    if not (folder / CONFIG_NAME).is_file():
        raise ModelNotFoundError(f"{folder} holds no model: there is no {CONFIG_NAME}; check the path")
    with _loading(folder):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    length = window_length(config, sequence_length)
    windows = token_windows(file_documents(text), tokenizer, count=limit, length=length)
    with _loading(folder):
        loaded = _load(folder)
    _refuse_unknown_tokens(folder, loaded, int(windows.max()))
    loaded = nn.Module.to(loaded, target)
    result = perplexity(loaded, windows, batch_size=_batch_size(config, length), on_progress=on_progress)
    return EvaluationResult(
        model=str(folder),
        text=str(text),
        sequence_length=length,
        windows=result.windows,
        tokens=result.tokens,
        negative_log_likelihood=result.negative_log_likelihood,
        perplexity=result.perplexity,
        device=str(target),
        dtype=str(loaded.dtype).removeprefix("torch."),
    )


def _refuse_unknown_tokens(folder: Path, model: PreTrainedModel, highest: int) -> None:
    embeddings = int(cast("Tensor", model.get_input_embeddings().weight).shape[0])
    if highest >= embeddings:
        raise CheckpointFormatError(
            f"the tokenizer of {folder} gives token {highest}, but the model has {embeddings} embeddings; use the "
            "tokenizer that belongs to the model"
        )


def _batch_size(config: PreTrainedConfig, length: int) -> int:
    """As many windows as keep the logits, the largest activation by far, within a fixed size."""
    bytes_per_window = 4 * length * int(config.get_text_config().vocab_size)
    return max(1, min(_LARGEST_BATCH, _LOGIT_BYTES_PER_BATCH // bytes_per_window))


def _load(folder: Path) -> PreTrainedModel:
    answer: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        dtype="auto",
        output_loading_info=True,
    )
    loaded, info = answer
    # What a checkpoint lacks, transformers draws at random and only warns: the figure would measure noise.
    lacking = sorted(info["missing_keys"])
    if lacking:
        raise CorruptCheckpointError(
            f"{folder} lacks {len(lacking)} weights, first {lacking[0]}; its files are incomplete or belong to another "
            f"{CONFIG_NAME}"
        )
    return cast("PreTrainedModel", loaded)


@contextmanager
def _loading(folder: Path) -> Iterator[None]:
    """Turns what transformers raises while it loads into the errors of this library."""
    try:
        yield
    except OSError as error:
        raise CheckpointFormatError(
            f"{folder} cannot be loaded: {_first_line(error)}; weights are read from safetensors only"
        ) from error
    except (SafetensorError, RuntimeError) as error:
        raise CorruptCheckpointError(
            f"weights of {folder} cannot be loaded: {_first_line(error)}; copy or download them again"
        ) from error
    except (ValueError, KeyError, ImportError) as error:
        raise UnsupportedArchitectureError(
            f"{folder} cannot be loaded as a causal language model: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
