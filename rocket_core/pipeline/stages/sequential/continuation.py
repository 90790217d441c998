"""What the dense model makes of a block's output: how much an error of the block costs further on."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from rocket_core.calibration.sensitivity import natural_loss, pieces
from rocket_core.calibration.token_loss import cut_batch
from rocket_core.healing import divergence_sum
from rocket_core.models.block_calls import Activations, placeholders, without_cache
from rocket_core.models.recorded_call import replace_tensors, to_float32
from rocket_core.pipeline.block_walk import loaded_block, loaded_surroundings
from rocket_core.pipeline.context import Run

_TEXT = frozenset({"input_ids", "attention_mask"})


class ErrorOf(Protocol):
    """Returns the error that hidden states lead to, per token: differentiable in the hidden states."""

    def __call__(self, batch: int, hidden: Float[Tensor, "windows tokens d"]) -> Float[Tensor, ""]:
        """Return the error of a batch."""


@contextmanager
def continuation(
    run: Run, index: int, dense: Activations, batches: Callable[[], Iterable[Mapping[str, Tensor]]]
) -> Iterator[ErrorOf | None]:
    """Yield how to measure what an error in the output of a block leads to, or None if nothing follows the block.

    The next block of the dense model is run on it. If that is the last block of a model that predicts tokens, the error
    is the Kullback-Leibler divergence of the predictions, and for the output of the last block itself as well;
    otherwise the squared difference to the output of the next block. Memory is that of one more block, of the hidden
    states at its output, and of what is outside of the blocks.

    Args:
        run: the run.
        index: the block.
        dense: the stream of the dense model, at the output of the block.
        batches: returns the arguments of the model, by batch.
    """
    blocks = run.architecture.list_of(index)
    model = run.architecture.model
    with ExitStack() as stack:
        found: ErrorOf | None = None
        states = dense
        following: nn.Module | None = None
        if index + 1 < blocks.stop:
            block = stack.enter_context(loaded_block(run, index + 1))
            hidden = [dense.run(block, index + 1, batch) for batch in range(len(dense.hidden))]
            states = replace(dense, hidden=hidden)
            following = copy.deepcopy(block).float().requires_grad_(False)
            found = _Difference(states.hidden)
        if index + 2 >= blocks.stop and _predicts_text(run, batches):
            stack.enter_context(loaded_surroundings(run, blocks, head=True))
            found = _Divergence(model, run.architecture.blocks_of(blocks), [*batches()], states)
        yield found if found is None or following is None else _after(following, index + 1, dense, found)


class _Difference:
    """Squared difference to hidden states of the dense model."""

    def __init__(self, wanted: Sequence[Tensor]) -> None:
        self._wanted = wanted

    def __call__(self, batch: int, hidden: Float[Tensor, "windows tokens d"]) -> Float[Tensor, ""]:
        return (hidden - self._wanted[batch].float()).square().sum() / hidden[..., 0].numel()


class _Divergence:
    """Divergence of next-token distributions from those of the dense model.

    Everything after the blocks is the model's own code, run on a piece of the text at a time.

    Args:
        model: with its weights, except those of the blocks.
        blocks: its blocks.
        batches: arguments of the model, by batch.
        states: the stream of the dense model, at the output of the last block.
    """

    def __init__(
        self, model: PreTrainedModel, blocks: nn.ModuleList, batches: list[Mapping[str, Tensor]], states: Activations
    ) -> None:
        self._model, self._blocks, self._batches, self._states = model, blocks, batches, states

    def __call__(self, batch: int, hidden: Float[Tensor, "windows tokens d"]) -> Float[Tensor, ""]:
        wanted = self._states.hidden[batch]
        leaf = hidden.detach().to(wanted.dtype).requires_grad_(torch.is_grad_enabled())
        total = torch.zeros((), device=hidden.device)
        for rows, columns in pieces(self._model, "tokens", hidden.shape):
            piece = cut_batch(self._batches[batch], rows, columns)
            with torch.no_grad():
                dense = self._logits(piece, wanted[rows, columns])
            divergence = divergence_sum(dense, self._logits(piece, leaf[rows, columns]))
            if divergence.requires_grad:
                divergence.backward()  # type: ignore[no-untyped-call]  # of torch
            total += divergence.detach()
        if leaf.grad is not None:
            # A term of zero with the gradient that has been computed piece by piece.
            total = total + ((hidden - hidden.detach()) * leaf.grad).sum()
        return total / hidden[..., 0].numel()

    def _logits(self, piece: Mapping[str, Tensor], hidden: Tensor) -> Float[Tensor, "windows tokens vocabulary"]:
        nothing = (None,) * (self._states.extra_count or 0)
        # A copy, as models may modify it in place, which a leaf forbids.
        with placeholders(self._blocks, lambda _index, _hidden, _call: hidden.clone(), lambda: nothing):
            logits: Tensor = self._model(**piece, **without_cache(self._model)).logits
        return logits


def _after(block: nn.Module, index: int, dense: Activations, error_of: ErrorOf) -> ErrorOf:
    """Return the error that is measured at the output of a block, as one of its input."""

    def error(batch: int, hidden: Tensor) -> Tensor:
        call = replace_tensors(dense.calls[batch][index - dense.first], to_float32)
        return error_of(batch, dense.output_of(block(hidden, *call.args, **call.kwargs), index, batch))

    return error


def _predicts_text(run: Run, batches: Callable[[], Iterable[Mapping[str, Tensor]]]) -> bool:
    architecture = run.architecture
    in_order = architecture.is_causal and len(architecture.lists) == 1
    if natural_loss(architecture.model, reads_in_order=in_order) != "tokens":
        return False
    # What reads images would run again in every step.
    return next(iter(batches())).keys() <= _TEXT
