"""How much a model's loss minds errors in each layer's output: one backward pass, a block at a time.

With g the gradient of the loss of a text with respect to output coordinate j of a layer, `E[g_j^2]` is the diagonal of
the layer's Fisher information. An error d in the output then costs `1/2 sum_j E[g_j^2] E[d_j^2]` per token, in the unit
of the loss, and so it adds up across layers that are otherwise not comparable. The backward pass needs the weights of
one block: it is run again on its cached input with gradients, and hands the gradient of its input to the block before.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from rocket_core.errors import NonFiniteCalibrationError, UnsupportedArchitectureError
from rocket_core.recording import BlockCall, stand_ins

Loss = Literal["tokens", "hidden_states"]

# Logits of one step, in float32. A handful of copies live at once: the model's own, the loss's, and their gradients.
_LOGIT_BYTES = 64 * 2**20
_NO_TARGET = -100
# In float16 numbers end at 2^16, so gradients are kept near 2^4: they may grow 4000-fold within a block.
_LARGEST_HALF_EXPONENT = 4
# Behind the blocks, where nothing is known yet: the first that gives finite gradients.
_HALF_EXPONENTS = (8, 0, -8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sensitivity:
    """How much the loss minds errors in a layer's output.

    Attributes:
        curvature: `f_j = sum_rows g_j^2 / tokens` in float64 on the CPU, >= 0: loss per token and squared unit of
            output coordinate j (nats for the loss `tokens`). Rows are the outputs of the layer, tokens those of the
            text: of an expert that sees a tenth of the text, the other tokens count as zero, and a layer that is called
            twice per token counts both. All zero where the loss does not depend on the layer.
    """

    curvature: Float[Tensor, " d_out"]

    @property
    def scale(self) -> float:
        """Loss per token that a mean squared output error of one costs: `1/2 mean_j f_j`.

        The cost of a candidate is this times `||S (W - W~)||_F^2 / rows`, the whitened squared error per calibration
        row of the layer; with the spread over coordinates, `1/2 sum_j f_j ||S (w_j - w~_j)||^2 / rows`.
        """
        return 0.5 * float(self.curvature.mean())


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledGradient:
    """A gradient times a power of two, so that a narrow dtype can hold it.

    Attributes:
        values: the gradient of one batch times `2**exponent`, in the model's dtype.
        exponent: 0 but for float16.
    """

    values: Float[Tensor, "windows tokens hidden"]
    exponent: int

    def centred(self) -> "ScaledGradient":
        """The same gradient, scaled so that it neither overflows nor vanishes in float16; other dtypes stay."""
        if self.values.dtype != torch.float16:
            return self
        largest = float(self.values.abs().max())
        if largest == 0.0 or not math.isfinite(largest):
            return self
        shift = _LARGEST_HALF_EXPONENT - math.frexp(largest)[1]
        # In float32, whose range no shift leaves.
        values = (self.values.float() * 2.0**shift).to(torch.float16)
        return ScaledGradient(values=values, exponent=self.exponent + shift)


def natural_loss(model: PreTrainedModel) -> Loss:
    """The loss of a model: that of predicting tokens if it can, else the change of its hidden states."""
    return "hidden_states" if model.get_output_embeddings() is None else "tokens"


def output_gradient(
    model: PreTrainedModel,
    blocks: nn.ModuleList,
    loss: Loss,
    tokens: Int[Tensor, "windows tokens"],
    hidden: Float[Tensor, "windows tokens hidden"],
    *,
    seed: int = 0,
) -> ScaledGradient:
    """Gradient of a batch's loss with respect to the output of the last block.

    - `tokens`: the negative log-likelihood of every token but the first of its window, in nats, summed.
    - `hidden_states`: `v . h` with h the model's final hidden states and v random signs. As `E[v v^T]` is the identity,
      the expectation of a squared gradient over v is the diagonal of `J^T J`, J the Jacobian of h: the Gauss-Newton
      diagonal of half the squared change of h.

    All that follows the blocks is the model's own code, run on a piece of text at a time; it must not mix tokens.

    Args:
        model: with its weights, but for those of the blocks; none may require a gradient.
        blocks: the repeated blocks of `model`.
        loss: which loss.
        tokens: token ids, on the model's device.
        hidden: output of the last block for them.
        seed: of the random signs.

    Returns:
        The gradient in the dtype of `hidden`, on its device; logits take a bounded number of bytes on the way.

    Raises:
        NonFiniteCalibrationError: the gradient is NaN or infinite.
    """
    for exponent in _HALF_EXPONENTS if hidden.dtype == torch.float16 else (0,):
        generator = torch.Generator().manual_seed(seed)
        gradient = torch.empty_like(hidden)
        for piece in _pieces(model, loss, tokens.shape):
            leaf = hidden[piece].detach().requires_grad_()
            with torch.enable_grad(), stand_ins(blocks, _always(leaf)):
                if loss == "tokens":
                    value = _negative_log_likelihood(model, tokens[piece], _targets(tokens)[piece])
                else:
                    value = _random_sum(_final_hidden(model, tokens[piece]), generator)
                value.mul(2.0**exponent).backward()  # type: ignore[no-untyped-call]  # of torch
            assert leaf.grad is not None
            gradient[piece] = leaf.grad
        if bool(torch.isfinite(gradient).all()):
            return ScaledGradient(values=gradient, exponent=exponent).centred()
    raise NonFiniteCalibrationError(_non_finite("gradients behind the last block"))


@dataclass(kw_only=True, slots=True)
class SquaredGradients:
    """Sums of squared gradients of a block's layers, collected by hooks.

    Attributes:
        layers: name and module of the layers.
        widths: d_out of each.
        sums: `sum_rows g_j^2` of each, float64.
    """

    layers: Mapping[str, nn.Module]
    widths: Mapping[str, int]
    sums: dict[str, Tensor] = field(default_factory=dict)
    _batch: int = 0
    _exponent: int = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Has gradients of the layers collected for as long as the context lasts."""
        handles = [module.register_forward_hook(self._watch(name)) for name, module in self.layers.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def pull_back(
        self, block: nn.Module, call: BlockCall, hidden: Tensor, gradient: ScaledGradient, *, batch: int
    ) -> ScaledGradient:
        """Runs a block again with gradients, adds up those of its layers if watched, and returns that of its input.

        Args:
            block: the block, with weights that require no gradient.
            call: how the model calls it.
            hidden: its input.
            gradient: of the loss with respect to its output.
            batch: number of the batch, for messages.

        Returns:
            The gradient of the loss with respect to `hidden`; zero if the block's output does not depend on it.

        Raises:
            NonFiniteCalibrationError: NaN or infinity in a gradient; the message names the layer.
            UnsupportedArchitectureError: the block has no backward pass.
        """
        self._batch, self._exponent = batch, gradient.exponent
        leaf = hidden.detach().requires_grad_()
        try:
            with torch.enable_grad():
                # A copy, as some blocks add to their input in place, which a leaf forbids.
                output = block(leaf.clone(), *call.args, **call.kwargs)
                output = output[0] if isinstance(output, tuple) else output
                if output.requires_grad:
                    output.backward(gradient.values)
        except NotImplementedError as error:
            raise UnsupportedArchitectureError(_no_backward(block)) from error
        if not output.requires_grad:
            raise UnsupportedArchitectureError(_no_backward(block))
        values = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        if not bool(torch.isfinite(values).all()):
            raise NonFiniteCalibrationError(
                _non_finite(f"gradients at the input of the block of layer {next(iter(self.layers), '')}", batch)
            )
        return ScaledGradient(values=values, exponent=gradient.exponent).centred()

    def total(self, name: str) -> Float[Tensor, " d_out"]:
        """The sum of a layer, on the CPU; zero for one that was never called or has no influence on the loss."""
        found = self.sums.get(name)
        return torch.zeros(self.widths[name], dtype=torch.float64) if found is None else found.cpu()

    def _watch(self, name: str) -> Callable[[nn.Module, Any, Tensor], Tensor | None]:
        def watch(_module: nn.Module, _args: Any, output: Tensor) -> Tensor | None:
            if not torch.is_grad_enabled():
                return None  # The model has cut this call off from its output.
            if not output.requires_grad:
                # It does not depend on the block's input, but the loss may well depend on it.
                output = output.detach().requires_grad_()
            # A copy: what a model changes in place must be no leaf, and no view, which loses its hooks by it.
            output = output.clone()
            output.register_hook(lambda gradient: self._add(name, gradient))  # type: ignore[no-untyped-call]
            return output

        return watch

    def _add(self, name: str, gradient: Tensor) -> None:
        rows = gradient.detach().reshape(-1, gradient.shape[-1]).to(torch.float64, copy=True)
        term = rows.square_().sum(0) * 4.0**-self._exponent
        if not bool(torch.isfinite(term).all()):
            raise NonFiniteCalibrationError(_non_finite(f"gradients of layer {name}", self._batch))
        self.sums[name] = self.sums[name].add_(term) if name in self.sums else term


def _always(hidden: Tensor) -> Callable[[int, Tensor, BlockCall], Tensor]:
    """What each stand-in hands on; a copy, as a model may go on in place, which a leaf forbids."""
    return lambda _index, _hidden, _call: hidden.clone()


def _pieces(model: PreTrainedModel, loss: Loss, shape: torch.Size) -> Iterator[tuple[slice, slice]]:
    """Windows and tokens of a batch that are run at once: as many as keep the logits within their size."""
    windows, length = 1, shape[1]
    if loss == "tokens":
        embeddings = model.get_output_embeddings().weight
        assert isinstance(embeddings, Tensor)
        tokens = max(1, _LOGIT_BYTES // (4 * embeddings.shape[0]))
        windows, length = max(1, tokens // shape[1]), min(shape[1], tokens)
    for row in range(0, shape[0], windows):
        for column in range(0, shape[1], length):
            yield slice(row, row + windows), slice(column, column + length)


def _targets(tokens: Tensor) -> Tensor:
    """The token that follows each; none behind the last of a window."""
    return torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], _NO_TARGET)], dim=1)


def _negative_log_likelihood(model: PreTrainedModel, tokens: Tensor, targets: Tensor) -> Float[Tensor, ""]:
    logits = model(input_ids=tokens, use_cache=False).logits
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=_NO_TARGET)


def _random_sum(states: Tensor, generator: torch.Generator) -> Float[Tensor, ""]:
    # Drawn on the CPU, whose digits are the same on every machine.
    signs = torch.randint(0, 2, states.shape, generator=generator) * 2 - 1
    return (states * signs.to(states.device)).sum()


def _final_hidden(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    states: Tensor = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
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
        "gradients; measure the change of the model's output instead"
    )
