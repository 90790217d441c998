"""Sensitivity of a model's loss to errors in each layer's output, by one backward pass, a block at a time.

With g the gradient of the loss of a text with respect to output coordinate j of a layer, `E[g_j^2]` is the diagonal of
the layer's Fisher information. An error d in the output then costs `1/2 sum_j E[g_j^2] E[d_j^2]` per token. This is in
the unit of the loss, so errors of otherwise incomparable layers can be added. The backward pass needs the weights of
one block only: the block is run again on its cached input with gradients, and the gradient of its input is passed to
the previous block.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import BFloat16, Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from rocket_core.calibration.ordered_gradients import ordered_gradients
from rocket_core.calibration.scaled_gradient import ScaledGradient
from rocket_core.calibration.token_loss import (
    TextLoss,
    cut_batch,
    negative_log_likelihood,
    next_tokens,
    read_tokens,
    uniform_draws,
)
from rocket_core.errors import NonFiniteCalibrationError, UnsupportedArchitectureError
from rocket_core.models.block_calls import Activations, handing_on, placeholders, without_cache
from rocket_core.models.recorded_call import BlockCall, replace_tensors

Loss = Literal["tokens", "hidden_states"]

# Logits of one step, in float32. A few copies exist at once: the model's own, the loss's, and their gradients.
_LOGIT_BYTES = 64 * 2**20
# Exponents to try after the last block, where no scale is known yet; the first with finite gradients is used.
_HALF_EXPONENTS = (8, 0, -8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sensitivity:
    """The sensitivity of the loss to errors in a layer's output.

    Attributes:
        fisher_diagonal: `f_j = sum_rows g_j^2 / tokens` in float64 on the CPU, >= 0: loss per token and squared unit of
            output coordinate j (nats for the loss `tokens`). Rows are the outputs of the layer, tokens those of the
            text: for an expert that sees a tenth of the text, the other tokens count as zero, and for a layer that is
            called twice per token both calls count. All zero if the loss does not depend on the layer.
        token_gradients: `sum_j g_j^2` of each token, relative to their mean, in bfloat16 on the CPU, in the order of
            the windows; None for layers that are called more than once, or do not see all tokens.
    """

    fisher_diagonal: Float[Tensor, " d_out"]
    token_gradients: BFloat16[Tensor, " tokens"] | None = None


def natural_loss(model: PreTrainedModel, *, reads_in_order: bool) -> Loss:
    """Return the loss to use for a model: `tokens` if it predicts tokens, else `hidden_states`.

    Args:
        model: the model.
        reads_in_order: whether its last blocks predict each token without seeing it, as in decoders.
    """
    return "tokens" if reads_in_order and model.get_output_embeddings() is not None else "hidden_states"


def output_gradient(
    model: PreTrainedModel,
    blocks: nn.ModuleList,
    loss: Loss,
    batch: Mapping[str, Tensor],
    activations: Activations,
    *,
    number: int = 0,
    passed: tuple[nn.ModuleList, Activations] | None = None,
    watched: "SquaredGradients | None" = None,
    text: TextLoss | None = None,
    drawn: bool = False,
) -> ScaledGradient:
    """Return the gradient of a batch's loss with respect to the output of the last block.

    - `tokens`: the negative log-likelihood of every token but the first of its window, in nats, summed; of the text's
      tokens, or of tokens drawn from the model's predictions.
    - `hidden_states`: `v . h` with h the model's final hidden states and v random signs. As `E[v v^T]` is the identity,
      the expectation of a squared gradient over v is the diagonal of `J^T J`, J the Jacobian of h: the Gauss-Newton
      diagonal of half the squared change of h.

    Everything after the blocks is the model's own code, run on a piece of the text at a time; it must not mix tokens.

    Args:
        model: with its weights, except those of the blocks; none may require a gradient.
        blocks: the repeated blocks of `model`; in an encoder-decoder those of the decoder.
        loss: the loss.
        batch: arguments of the model by name, on its device.
        activations: contain the output of the last block.
        number: index of the batch in the activations; the random signs depend on it.
        passed: in an encoder-decoder the encoder's blocks, and their activations with the last one's output.
        watched: layers after the blocks whose gradients are added up as well.
        text: sums to which those of the batch are added, for the loss `tokens`.
        drawn: whether the loss `tokens` is that of drawn tokens.

    Returns:
        The gradient in the dtype of the hidden states, on their device. Memory for intermediate logits is bounded.

    Raises:
        NonFiniteCalibrationError: the gradient is NaN or infinite.
    """
    hidden = activations.hidden[number]
    for exponent in _HALF_EXPONENTS if hidden.dtype == torch.float16 else (0,):
        generator = torch.Generator().manual_seed(number)
        gradient = torch.empty_like(hidden)
        before = None if watched is None else watched.begin(batch=number, exponent=exponent)
        found = TextLoss()
        read = read_tokens(batch) if drawn else None
        draws = None if read is None else uniform_draws(read)
        for rows, columns in pieces(model, loss, hidden.shape):
            leaf = hidden[rows, columns].detach().requires_grad_()
            piece = cut_batch(batch, rows, columns)
            with (
                handing_on(passed, number, rows),
                torch.enable_grad(),
                placeholders(blocks, _always(leaf), activations.absent_extras),
                contextlib.nullcontext() if watched is None else watched.watching(),
            ):
                if loss == "tokens":
                    targets = next_tokens(model, batch)[rows, columns]
                    own = None if draws is None else draws[rows, columns]
                    value = negative_log_likelihood(model, piece, targets, own, found)
                else:
                    value = _random_sum(_final_hidden(model, piece), generator)
                value.mul(2.0**exponent).backward()  # type: ignore[no-untyped-call]  # of torch
            assert leaf.grad is not None
            gradient[rows, columns] = leaf.grad
        if bool(torch.isfinite(gradient).all()):
            if text is not None:
                text.add(found)
            return ScaledGradient(values=gradient, exponent=exponent).centred()
        if watched is not None and before is not None:
            watched.sums = before
    raise NonFiniteCalibrationError(_non_finite("gradients after the last block"))


def side_inputs(calls: Sequence[BlockCall]) -> list[Tensor]:
    """Return the tensors that blocks receive in addition to hidden states and that require gradients, each once.

    Args:
        calls: calls of all blocks of a decoder, for one batch, recorded with gradients; see `record_block_inputs`.
    """
    found: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            found.setdefault(id(tensor), tensor)
        return tensor

    for call in calls:
        replace_tensors(call, note)
    return list(found.values())


def gradient_of_encoder(
    output: Float[Tensor, "windows tokens hidden"],
    reached: Sequence[Tensor],
    gradients: Sequence[ScaledGradient],
    *,
    batch: int,
) -> ScaledGradient:
    """Return the gradient with respect to the output of an encoder's last block.

    Args:
        output: that output, a leaf that requires gradients.
        reached: tensors computed from it that the decoder's blocks received, with their autograd graphs.
        gradients: the gradient of each.
        batch: index of the batch, for messages.

    Raises:
        NonFiniteCalibrationError: the gradient has NaN or infinity.
    """
    exponent = min((gradient.exponent for gradient in gradients), default=0)
    values = [gradient.at(exponent).to(output.dtype) for gradient in gradients]
    if reached:
        torch.autograd.backward(list(reached), values)
    found = torch.zeros_like(output) if output.grad is None else output.grad
    if not bool(torch.isfinite(found).all()):
        raise NonFiniteCalibrationError(_non_finite("gradients after the encoder", batch))
    return ScaledGradient(values=found.detach(), exponent=exponent).centred()


@dataclass(kw_only=True, slots=True)
class SquaredGradients:
    """Sums of squared gradients of a block's layers, collected by hooks.

    Attributes:
        layers: name and module of the layers.
        widths: d_out of each layer.
        sums: `sum_rows g_j^2` of each layer, in float64.
        keeps_tokens: whether the gradients of each token are kept as well.
        by_token: `sum_j g_j^2` of each layer, batch and token, in float32; None for a layer called twice in a batch.
    """

    layers: Mapping[str, nn.Module]
    widths: Mapping[str, int]
    sums: dict[str, Tensor] = field(default_factory=dict)
    keeps_tokens: bool = False
    by_token: dict[str, dict[int, Tensor] | None] = field(default_factory=dict)
    _batch: int = 0
    _exponent: int = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Collect gradients of the layers while the context is active."""
        with contextlib.ExitStack() as hooks:
            for name, module in self.layers.items():
                hooks.enter_context(module.register_forward_hook(functools.partial(self._watch, name)))
            yield

    def pull_back(
        self,
        block: nn.Module,
        call: BlockCall,
        hidden: Tensor,
        gradient: ScaledGradient,
        *,
        batch: int,
        sides: Sequence[Tensor] = (),
    ) -> tuple[ScaledGradient, list[ScaledGradient]]:
        """Run a block again with gradients, add up those of its layers if watched, and return that of its input.

        Args:
            block: the block, with weights that require no gradient.
            call: how the model calls it.
            hidden: its input.
            gradient: gradient of the loss with respect to its output.
            batch: index of the batch, for messages.
            sides: see `side_inputs`.

        Returns:
            The gradients of the loss with respect to `hidden` and, through this block, to each of `sides`; zero if
            the block's output does not depend on them.

        Raises:
            NonFiniteCalibrationError: a gradient has NaN or infinity; the message names the layer.
            UnsupportedArchitectureError: the block has no backward pass.
        """
        self._batch, self._exponent = batch, gradient.exponent
        leaf = hidden.detach().requires_grad_()
        beside = {id(side): side.detach().requires_grad_() for side in sides}
        call = replace_tensors(call, lambda tensor: beside.get(id(tensor), tensor))
        try:
            with torch.enable_grad(), ordered_gradients():
                # A copy, as some blocks modify their input in place, which is not allowed for a leaf.
                output = block(leaf.clone(), *call.args, **call.kwargs)
                output = output[0] if isinstance(output, tuple | list) else output
                if output.requires_grad:
                    output.backward(gradient.values)
        except NotImplementedError as error:
            raise UnsupportedArchitectureError(_no_backward(block)) from error
        if not output.requires_grad:
            raise UnsupportedArchitectureError(_no_backward(block))
        first, *rest = (self._gradient_at(tensor, gradient.exponent) for tensor in (leaf, *beside.values()))
        return first, rest

    def begin(self, *, batch: int, exponent: int) -> dict[str, Tensor]:
        """Prepare for the gradients of a batch, and return a copy of the sums so far.

        Args:
            batch: index of the batch, for messages.
            exponent: logarithm of the factor that gradients have.
        """
        self._batch, self._exponent = batch, exponent
        return {name: total.clone() for name, total in self.sums.items()}

    def pull_to_start(
        self, run: Callable[[], Sequence[Tensor]], gradients: Sequence[ScaledGradient], *, batch: int
    ) -> None:
        """Run what precedes the blocks with gradients, and add up those of the layers.

        Args:
            run: returns the input of the first block, and whatever else was computed before it and reaches the loss.
            gradients: gradients of the loss with respect to these.
            batch: index of the batch, for messages.
        """
        exponent = min(gradient.exponent for gradient in gradients)
        self.begin(batch=batch, exponent=exponent)
        with torch.enable_grad(), self.watching(), ordered_gradients():
            pairs = [
                (tensor, gradient.at(exponent).to(tensor.dtype))
                for tensor, gradient in zip(run(), gradients, strict=True)
                if tensor.requires_grad
            ]
            if pairs:
                torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])

    def _gradient_at(self, leaf: Tensor, exponent: int) -> ScaledGradient:
        values = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        if not bool(torch.isfinite(values).all()):
            where = f"gradients at the input of the block of layer {next(iter(self.layers), '')}"
            raise NonFiniteCalibrationError(_non_finite(where, self._batch))
        return ScaledGradient(values=values, exponent=exponent).centred()

    def total(self, name: str) -> Float[Tensor, " d_out"]:
        """Return a layer's sum, on the CPU; zero if it was never called or does not influence the loss."""
        found = self.sums.get(name)
        return torch.zeros(self.widths[name], dtype=torch.float64) if found is None else found.cpu()

    def token_gradients(self, name: str) -> BFloat16[Tensor, " tokens"] | None:
        """Return the squared gradients of a layer by token; see `Sensitivity`."""
        batches = self.by_token.get(name)
        if not batches:
            return None
        found = torch.cat([batches[batch] for batch in sorted(batches)])
        # Without gradients these are all NaN, which is found out once they are on the CPU.
        relative = (found / found.mean()).bfloat16().cpu()
        return None if bool(relative.isnan().all()) else relative

    def _watch(self, name: str, _module: nn.Module, _args: Any, output: Tensor) -> Tensor | None:
        if not torch.is_grad_enabled():
            return None  # The model runs this call without gradients.
        if not output.requires_grad:
            # It does not depend on the block's input, but the loss may still depend on it.
            output = output.detach().requires_grad_()
        # A copy: the model may modify it in place, which a leaf forbids and which removes the hooks of a view.
        output = output.clone()
        output.register_hook(lambda gradient: self._add(name, gradient))  # type: ignore[no-untyped-call]
        return output

    def _add(self, name: str, gradient: Tensor) -> None:
        rows = gradient.detach().reshape(-1, gradient.shape[-1])
        wide = torch.promote_types(rows.dtype, torch.float32)
        squares = rows.to(wide, copy=True).square_()
        # A float32 square below 1e-38 becomes zero.
        factor = 4.0**-self._exponent
        term = squares.sum(0).double() * factor
        if not bool(torch.isfinite(term).all()):
            raise NonFiniteCalibrationError(_non_finite(f"gradients of layer {name}", self._batch))
        self.sums[name] = self.sums[name].add_(term) if name in self.sums else term
        batches = self.by_token.setdefault(name, {}) if self.keeps_tokens else None
        if batches is not None:
            self.by_token[name] = (
                None if self._batch in batches else {**batches, self._batch: squares.sum(1).float() * factor}
            )


def _always(hidden: Tensor) -> Callable[[int, Tensor, BlockCall], Tensor]:
    """Return a `receive` for placeholders that returns a copy: models may modify it in place, which a leaf forbids."""
    return lambda _index, _hidden, _call: hidden.clone()


def pieces(model: PreTrainedModel, loss: Loss, shape: torch.Size) -> Iterator[tuple[slice, slice]]:
    """Yield the windows and tokens of a batch to run at once: as many as keep the logits within `_LOGIT_BYTES`."""
    windows, length = 1, shape[1]
    if loss == "tokens":
        embeddings = model.get_output_embeddings().weight
        assert isinstance(embeddings, Tensor)
        tokens = max(1, _LOGIT_BYTES // (4 * embeddings.shape[0]))
        windows, length = max(1, tokens // shape[1]), min(shape[1], tokens)
    for row in range(0, shape[0], windows):
        for column in range(0, shape[1], length):
            yield slice(row, row + windows), slice(column, column + length)


def _random_sum(states: Tensor, generator: torch.Generator) -> Float[Tensor, ""]:
    # Drawn on the CPU, where the numbers are the same on every machine.
    signs = torch.randint(0, 2, states.shape, generator=generator) * 2 - 1
    return (states * signs.to(states.device)).sum()


def _final_hidden(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> Tensor:
    states: Tensor = model.base_model(**batch, **without_cache(model.base_model)).last_hidden_state
    return states.to(torch.promote_types(states.dtype, torch.float32))


def _non_finite(what: str, batch: int | None = None) -> str:
    where = "" if batch is None else f" in calibration batch {batch}"
    return (
        f"{what} are NaN or infinite{where}; run the model in a wider dtype (dtype float32), or check its weights and "
        "the calibration text"
    )


def _no_backward(block: nn.Module) -> str:
    return (
        f"{type(block).__name__} has no backward pass, so that the loss's sensitivity to its layers cannot be had from "
        "gradients; take objective whitened"
    )
