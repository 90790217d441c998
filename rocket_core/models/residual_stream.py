"""The residual stream of a block: which of its parts add to the hidden states, and which layers end such a part."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rocket_core.models.part_cache import called_parts

# How far a coefficient found by least squares may be from 0 or 1. Multipliers of residuals in use are below 0.5.
_COEFFICIENT_TOLERANCE = 0.02
# Tokens that are looked at, evenly spread over a batch: enough numbers, and little memory.
_TOKENS = 256
# Upper bound on what rounding the sums within a block leaves, in units of the precision of the hidden states.
_ROUNDING_ERRORS = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ResidualStream:
    """The parts of a block whose outputs add up to what it adds to its input.

    Attributes:
        parts: their names within the block, in the order of their calls; empty if there are no such parts.
        layers: layers whose output is that of such a part.
    """

    parts: tuple[str, ...] = ()
    layers: frozenset[str] = frozenset()

    @contextmanager
    def before(self, layer: nn.Module, block: nn.Module, hidden: Tensor) -> Iterator["StreamState"]:
        """Observe the stream while a block is run, until a layer is called.

        Args:
            layer: a layer of the block.
            block: the block, or a copy of it.
            hidden: the block's input.

        Yields:
            The state, which after the run has what the stream was when the layer was called.
        """
        state = StreamState(value=hidden.detach().clone())

        def add(_module: nn.Module, _args: Any, output: Any) -> None:
            state.add(_first_tensor(output))

        def stop(*_args: Any) -> None:
            state.is_reached = True

        with ExitStack() as stack:
            for part in self.parts:
                stack.callback(block.get_submodule(part).register_forward_hook(add).remove)
            stack.callback(layer.register_forward_pre_hook(stop).remove)
            yield state


@dataclass(kw_only=True, slots=True)
class StreamState:
    """Hidden states of a batch within a block.

    Attributes:
        value: the block's input and what its parts have added to it.
        is_reached: whether the layer is reached, after which nothing is added.
    """

    value: Tensor
    is_reached: bool = False

    @property
    def rows(self) -> Float[Tensor, "rows hidden"]:
        """The hidden states of all tokens."""
        return self.value.reshape(-1, self.value.shape[-1])

    def add(self, output: Tensor | None) -> None:
        """Add the output of a part."""
        if not self.is_reached:
            assert output is not None
            self.value += output.reshape(self.value.shape)


@dataclass(kw_only=True, slots=True)
class _Outputs:
    """Outputs of modules for some tokens in one run of a block, of those that have the size of the hidden states.

    Attributes:
        found: by name, in the order of calls.
        repeated: modules that were called more than once.
    """

    found: dict[str, Tensor] = field(default_factory=dict)
    repeated: set[str] = field(default_factory=set)

    def note(self, name: str, output: Tensor | None, hidden: Tensor) -> None:
        """Keep an output of a module."""
        if name in self.found:
            self.repeated.add(name)
        if output is not None and output.numel() == hidden.numel() and output.shape[-1] == hidden.shape[-1]:
            self.found[name] = _some_tokens(output)

    def of(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the outputs of those of the named modules that were called once."""
        return {name: found for name, found in self.found.items() if name in names and name not in self.repeated}


def find_residual_stream(
    block: nn.Module, layers: Mapping[str, nn.Module], hidden: Tensor, run: Callable[[], object]
) -> ResidualStream:
    """Find by measurement the parts of a block that add to the residual stream.

    Let x be the block's input, y its output and c_k the outputs of the modules that it calls itself. With the
    coefficients of least squares, y - x = Σ_k a_k c_k must hold up to rounding errors, and every a_k must be 0 or 1.
    Then the parts are those with a_k = 1. No block qualifies that scales what it adds or normalises sums; one that
    normalises outputs before it adds them has its norms as parts, whose outputs are of no layer.

    Args:
        block: the block.
        layers: its layers by name.
        hidden: x.
        run: runs the block on x once.
    """
    before, outputs, returned = _some_tokens(hidden), _Outputs(), _Outputs()
    parts = dict(called_parts(block))
    with ExitStack() as stack:
        for name, module in {**parts, **layers}.items():
            stack.callback(module.register_forward_hook(_noting(outputs, name, hidden)).remove)
        stack.callback(block.register_forward_hook(_noting(returned, "", hidden)).remove)
        run()
    if not returned.found:
        return ResidualStream()
    candidates = _distinct(outputs.of(list(parts)))
    added = _added(candidates, before, returned.found[""])
    ends = {
        name
        for name, found in outputs.of(list(layers)).items()
        if any(torch.equal(found, candidates[part]) for part in added)
    }
    return ResidualStream(parts=tuple(added), layers=frozenset(ends))


def _some_tokens(states: Tensor) -> Float[Tensor, "rows hidden"]:
    """Return a copy of some tokens' states, as blocks may modify them in place."""
    rows = states.detach().reshape(-1, states.shape[-1])
    return rows[:: -(-len(rows) // _TOKENS)].clone()


def _noting(outputs: _Outputs, name: str, hidden: Tensor) -> Callable[..., None]:
    def note(_module: nn.Module, _args: Any, output: Any) -> None:
        outputs.note(name, _first_tensor(output), hidden)

    return note


def _first_tensor(output: Any) -> Tensor | None:
    first = output[0] if isinstance(output, tuple | list) and output else output
    return first if isinstance(first, Tensor) else None


def _distinct(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the outputs without repetitions, such as those of a dropout that does nothing."""
    distinct: dict[str, Tensor] = {}
    for name, output in outputs.items():
        if bool(output.any()) and not any(torch.equal(output, other) for other in distinct.values()):
            distinct[name] = output
    return distinct


def _added(
    candidates: Mapping[str, Float[Tensor, "rows hidden"]],
    before: Float[Tensor, "rows hidden"],
    after: Float[Tensor, "rows hidden"],
) -> list[str]:
    """Return the candidates that add up to the difference; an empty list if it is not a sum of such."""
    if not candidates:
        return []
    columns = [output.double().flatten() for output in candidates.values()]
    difference = after.double().flatten() - before.double().flatten()
    # Relative to their norms, so that the system is well conditioned even if outputs differ in size.
    norms = torch.stack([column.norm() for column in columns])
    products = torch.stack([torch.stack([one @ other for other in columns]) for one in columns])
    wanted = torch.stack([column @ difference for column in columns])
    found = torch.linalg.lstsq(products / norms / norms[:, None], wanted / norms).solution / norms
    nearest = found.round().clamp(0, 1)
    if bool(((found - nearest).abs() > _COEFFICIENT_TOLERANCE).any()):
        return []
    names = [name for name, coefficient in zip(candidates, nearest.tolist(), strict=True) if coefficient]
    left = difference - sum((candidates[name].double().flatten() for name in names), torch.zeros_like(difference))
    size = before.double().norm() + after.double().norm()
    if float(left.norm()) > _ROUNDING_ERRORS * torch.finfo(before.dtype).eps * float(size):
        return []
    return names
