"""Streaming Gram matrices, one block at a time (paper, section 3).

A block is run on the inputs that it gets in the dense model; hooks accumulate the Gram matrices of its linear layers'
inputs. Layers that read the same tensor share one matrix.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rocket_core.errors import NonFiniteCalibrationError
from rocket_core.estimates.layer_footprint import held_out_tokens
from rocket_core.linalg.gram_sum import add_gram, symmetric
from rocket_core.linalg.rough_products import rough_products
from rocket_core.linalg.whitening import GramStatistics, shrunk_for_weights
from rocket_core.models.architecture import oriented_weight


@dataclass(frozen=True, kw_only=True, slots=True)
class InputGroup:
    """Layers of a block that read the same tensor.

    Attributes:
        layers: layer names in calling order; the first one names the group.
        from_output: whether the Gram matrices of the members' outputs are collected instead of the input's.
    """

    layers: tuple[str, ...]
    from_output: bool


@dataclass(kw_only=True, slots=True)
class _Sums:
    """Running sums of one layer, in float64; those of Gram matrices as by `add_gram`."""

    tokens: int = 0
    gram: Tensor | None = None
    energy: Tensor | None = None
    output_gram: Tensor | None = None
    held_out: list[Tensor] = field(default_factory=list)


def find_input_groups(
    layers: Mapping[str, nn.Module], shapes: Mapping[str, tuple[int, int]], run: Callable[[], object]
) -> tuple[InputGroup, ...]:
    """Find which layers are called, and which of them read the same tensor, by running the block once.

    A group collects the Gram matrix of its input, or those of its members' outputs if these are smaller in total.

    Args:
        layers: name and module of the candidates.
        shapes: `(d_in, d_out)` of each.
        run: runs the block on one batch.

    Returns:
        The groups in calling order. A layer that is never called through `forward` is in no group.
    """
    keys: dict[str, set[tuple[Any, ...]]] = {}
    # Inputs are kept alive until the run ends: a reused address would merge two groups.
    inputs: list[Tensor] = []

    def note(name: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
        tensor = first_input(args, kwargs)
        inputs.append(tensor)
        key = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride())
        keys.setdefault(name, set()).add((*key, tensor._version))

    with ExitStack() as hooks:
        for name, module in layers.items():
            hooks.enter_context(module.register_forward_pre_hook(functools.partial(note, name), with_kwargs=True))
        run()
    groups: dict[object, list[str]] = {}
    for name, seen in keys.items():
        # A layer that is called with several inputs gets its own group.
        groups.setdefault(next(iter(seen)) if len(seen) == 1 else name, []).append(name)
    return tuple(_input_group(tuple(names), shapes) for names in groups.values())


def collect_statistics(
    layers: Mapping[str, nn.Module],
    groups: Sequence[InputGroup],
    run: Callable[[int], object],
    *,
    batches: int,
    dtype: torch.dtype,
    weights: Callable[[Sequence[str]], Tensor | None] = lambda _layers: None,
) -> dict[str, GramStatistics]:
    """Run a block on all batches and accumulate the Gram matrices of its layers, XᵀX, or XᵀTX with weighted tokens.

    Products are computed in `dtype` and summed in float64. If tokens are weighted, the last 2,048 of them, or an eighth
    if that is less, are not summed but returned as they are.

    Args:
        layers: name and module of the block's compressible layers.
        groups: layers that share an input.
        run: runs the block on the batch with that index.
        batches: number of batches.
        dtype: dtype of the products, float32 or float64.
        weights: given the layers that read an input, returns the weight of each token of all batches, with mean 1; None
            if all count the same.

    Returns:
        Statistics by layer name; members of a group share tensors. A layer that no batch reached has none.

    Raises:
        NonFiniteCalibrationError: a layer's input or output has NaN or infinity; the message names layer and batch.
    """
    roots = {group.layers[0]: _root(weights(group.layers), dtype) for group in groups}
    collector = _Collector(dtype=dtype, roots=roots)
    with ExitStack() as hooks:
        for group in groups:
            for name in group.layers if group.from_output else group.layers[:1]:
                add = functools.partial(collector.add, name, group)
                hooks.enter_context(layers[name].register_forward_hook(add, with_kwargs=True))
        for batch in range(batches):
            collector.batch = batch
            run(batch)
    called = [group for group in groups if group.layers[0] in collector.sums]
    return {name: found for group in called for name, found in collector.statistics(group).items()}


def sum_inputs(name: str, inputs: Iterable[Tensor], dtype: torch.dtype) -> GramStatistics:
    """Accumulate the Gram matrix of a single layer's inputs.

    Args:
        name: name for messages.
        inputs: what the layer reads, batch by batch.
        dtype: dtype of the products, float32 or float64.

    Raises:
        NonFiniteCalibrationError: an input has NaN or infinity.
    """
    collector = _Collector(dtype=dtype)
    group = InputGroup(layers=(name,), from_output=False)
    for batch, tensor in enumerate(inputs):
        collector.batch = batch
        collector.add(name, group, nn.Identity(), (tensor,), {}, tensor)
    return collector.statistics(group)[name]


@dataclass(kw_only=True, slots=True)
class _Collector:
    """Sums of all layers.

    Attributes:
        dtype: dtype of the products.
        roots: root of each token's weight, by the name of a group; None if all tokens count the same.
        batch: number of the batch.
        sums: by layer.
    """

    dtype: torch.dtype
    roots: Mapping[str, Tensor | None] = field(default_factory=dict)
    batch: int = 0
    sums: dict[str, _Sums] = field(default_factory=dict)

    def add(self, name: str, group: InputGroup, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        """Add a layer's contribution to its group; a forward hook, once name and group are bound."""
        sums = self.sums.setdefault(name, _Sums())
        read = first_input(args, kwargs)
        read = read.detach().reshape(-1, read.shape[-1])
        roots, root = self.roots.get(group.layers[0]), None
        if roots is not None:
            begin, last = sums.tokens, len(roots) - held_out_tokens(len(roots))
            number = min(len(read), last - begin)
            if number < len(read) and name == group.layers[0]:
                sums.held_out.append(self._finite(read[number:].to(self.dtype, copy=True), name))
            read, output = read[:number], output.reshape(-1, output.shape[-1])[:number]
            root = roots[begin : begin + number, None].to(read.device)
        sums.tokens += len(read)
        if name == group.layers[0]:
            rows = self._rows(read, root)
            if group.from_output:
                energy = rows.square().sum(0).double()
                sums.energy = self._finite(energy if sums.energy is None else sums.energy + energy, name)
            else:
                # Rows in bfloat16 are exact. Weighted ones get an error of 1/512 of themselves, far less than what
                # shrinking adds.
                with rough_products(read.device) if read.dtype == torch.bfloat16 else nullcontext():
                    sums.gram = add_gram(sums.gram, rows)
                # A NaN or infinity anywhere in the rows appears on the diagonal.
                self._finite(sums.gram.diagonal(), name)
        if group.from_output:
            # Subtracting a large bias from a rounded output would leave noise; a second product costs little.
            biased = isinstance(module.bias, Tensor)
            weight = oriented_weight(module).to(self.dtype) if biased else None
            rows = self._rows(output, root) if weight is None else self._rows(read, root) @ weight
            sums.output_gram = add_gram(sums.output_gram, rows)
            self._finite(sums.output_gram.diagonal(), name)

    def statistics(self, group: InputGroup) -> dict[str, GramStatistics]:
        """Return the finished sums of a group's layers, whose Gram matrix is shrunk if tokens are weighted."""
        first, roots = self.sums[group.layers[0]], self.roots.get(group.layers[0])
        gram = None if first.gram is None else symmetric(first.gram)
        if gram is not None and roots is not None:
            gram = shrunk_for_weights(gram, roots[: first.tokens].square())
        energy = first.energy if gram is None else gram.diagonal()
        assert energy is not None
        held_out = torch.cat(first.held_out) if first.held_out else None
        outputs = {name: self.sums[name].output_gram if group.from_output else None for name in group.layers}
        return {
            name: GramStatistics(
                tokens=first.tokens,
                gram=gram,
                output_gram=None if output_gram is None else symmetric(output_gram),
                input_energy=energy,
                held_out=held_out,
            )
            for name, output_gram in outputs.items()
        }

    def _rows(self, tensor: Tensor, root: Float[Tensor, "rows 1"] | None) -> Float[Tensor, "rows features"]:
        rows = tensor.detach().reshape(-1, tensor.shape[-1]).to(self.dtype)
        return rows if root is None else rows * root

    def _finite(self, values: Tensor, name: str) -> Tensor:
        if not bool(torch.isfinite(values).all()):
            raise NonFiniteCalibrationError(
                f"activations of layer {name} are NaN or infinite in calibration batch {self.batch}; run the model in "
                "a wider dtype (dtype float32), or check its weights and the calibration text"
            )
        return values


def _root(weights: Float[Tensor, " tokens"] | None, dtype: torch.dtype) -> Float[Tensor, " tokens"] | None:
    return None if weights is None else weights.sqrt().to(dtype)


def first_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the input of a linear layer's call, passed by position or by name."""
    tensor: Tensor = args[0] if args else next(iter(kwargs.values()))
    return tensor


def _input_group(layers: tuple[str, ...], shapes: Mapping[str, tuple[int, int]]) -> InputGroup:
    d_in = shapes[layers[0]][0]
    outputs = [shapes[name][1] for name in layers]
    # The output's Gram matrix determines the basis only if d_out <= d_in.
    from_output = max(outputs) <= d_in and sum(d_out**2 for d_out in outputs) < d_in**2
    return InputGroup(layers=layers, from_output=from_output)
