"""Experts with a linear layer for each matrix, in place of a module that stores them in common parameters."""

import operator
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from rocket_core.experts.layout import ExpertsLayout, find_router

Visits = Literal["routed", "each", "all"]
"""Tokens that experts read: those routed to them; at least one each; or all. The results are the same."""


class Expert(nn.Module):
    """One expert.

    Args:
        original: the module of all experts, without weights, which knows what is computed between the layers.
        layout: how that module stores its experts.
        dtype: dtype of its parameters, which are on the meta device.
    """

    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear

    def __init__(self, original: nn.Module, layout: ExpertsLayout, dtype: torch.dtype) -> None:
        super().__init__()
        # In a tuple, so that it is not a submodule, and nothing initializes, moves or saves it.
        self._original: tuple[Any] = (original,)
        self._layout = layout
        for name in layout.kind.matrices:
            sizes = (layout.inner, layout.hidden) if name == "down_proj" else (layout.hidden, layout.inner)
            setattr(self, name, nn.Linear(*sizes, bias=layout.kind.biased, device="meta", dtype=dtype))

    def inner(self, states: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens inner"]:
        """Return what the last layer reads."""
        [original], up, kind = self._original, self.up_proj(states), self._layout.kind
        activation = operator.attrgetter("_apply_gate" if kind.applies_gate else kind.activation)(original)
        inner: Tensor
        if "gate_proj" not in kind.matrices:
            inner = activation(up)
        elif not kind.applies_gate:
            inner = up * activation(self.gate_proj(states))
        else:
            both = (self.gate_proj(states), up)
            interleaved = kind.matrices["gate_proj"].interleaved
            inner = activation(torch.stack(both, dim=-1).flatten(-2) if interleaved else torch.cat(both, dim=-1))
        return inner

    def forward(self, states: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens hidden"]:
        """Return the expert's output, before the router's weights."""
        output: Tensor = self.down_proj(self.inner(states))
        return output


class UnfusedExperts(nn.ModuleList):
    """The experts of a block; is called as the module that it replaces, and returns the same.

    Args:
        original: the module to replace, on the meta device.
        layout: how it stores its experts.

    Attributes:
        layout: how the original module stores its experts.
        visits: which tokens experts read; see `visiting`.
    """

    def __init__(self, original: nn.Module, layout: ExpertsLayout) -> None:
        dtype = original.get_parameter(layout.kind.matrices["down_proj"].parameter).dtype
        super().__init__(Expert(original, layout, dtype) for _ in range(layout.experts))
        # In a tuple, as in an expert.
        self._original = (original,)
        self.layout = layout
        self.visits: Visits = "routed"

    @property
    def original(self) -> nn.Module:
        """The original module, with parameters on the meta device."""
        return self._original[0]

    def forward(self, hidden_states: Float[Tensor, "*rows hidden"], *routing: Tensor) -> Float[Tensor, "*rows hidden"]:
        """Return the sum of the experts' outputs for each token, or their outputs if the caller adds them up.

        Args:
            hidden_states: states of the tokens; without routing, of all tokens for each expert.
            routing: the experts of each token, and their weights.
        """
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        mixed = torch.zeros_like(flat)
        states = self.entering(hidden_states)
        for expert, (rows, targets, weights) in zip(self, self._routes(flat, *routing), strict=True):
            output = self._visit(expert, states, rows)
            if output is not None:
                scaled = output if weights is None else output * weights[:, None]
                mixed.index_add_(0, targets, scaled.to(mixed.dtype))
        return mixed.view_as(hidden_states)

    def entering(
        self, hidden_states: Float[Tensor, "*rows hidden"], like: Float[Tensor, "*rows hidden"] | None = None
    ) -> Float[Tensor, "tokens hidden"]:
        """Return the states that may be routed to any expert.

        Args:
            hidden_states: the states that the module is called with.
            like: those of another model's call, which decide what is routed; None for `hidden_states` themselves.
        """
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        deciding = flat if like is None else like.reshape(flat.shape)
        return flat if self.layout.kind.routed else flat[deciding.any(dim=-1)]

    def routed_rows(self, hidden_states: Float[Tensor, "*rows hidden"], *routing: Tensor) -> list[Int[Tensor, " n"]]:
        """Return for each expert the rows of `entering` that it reads; arguments are those of a call."""
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        return [rows for rows, _, _ in self._routes(flat, *routing)]

    def _routes(
        self, flat: Tensor, indices: Tensor | None = None, weights: Tensor | None = None
    ) -> Iterator[tuple[Int[Tensor, " n"], Int[Tensor, " n"], Float[Tensor, " n"] | None]]:
        """Yield for each expert the rows of `entering` that it reads, those of the result, and the router's weights."""
        if indices is None or weights is None:
            # A row of zeros, which is not routed, has a result of zero.
            targets = flat.any(dim=-1).nonzero().squeeze(1)
            owners = targets // (flat.shape[0] // len(self))
            for expert in range(len(self)):
                rows = (owners == expert).nonzero().squeeze(1)
                yield rows, targets[rows], None
            return
        choices = indices.shape[-1]
        owners, order = torch.sort(indices.flatten(), stable=True)
        ends = torch.searchsorted(owners, torch.arange(len(self), device=owners.device), right=True).tolist()
        scales = weights.flatten()
        for begin, end in zip([0, *ends], ends, strict=False):
            chosen = order[begin:end]
            yield chosen // choices, chosen // choices, scales[chosen]

    def _visit(self, expert: nn.Module, states: Tensor, rows: Tensor) -> Tensor | None:
        """Return the outputs of an expert for some rows of `entering`; None for no rows."""
        output: Tensor | None = None
        if self.visits == "all":
            # Copied, as layers that read one tensor are taken for layers that could share a dictionary.
            output = expert(states.clone())[rows]
        elif len(rows):
            output = expert(states[rows])
        elif self.visits == "each":
            expert(states[:1].clone())
        return output


@contextmanager
def following_router(leader: nn.Module, follower: nn.Module, experts: str) -> Iterator[None]:
    """While active, let a router return what that of another model returned last, so that experts get the same tokens.

    Only experts that are not told which tokens they get need it: those that are, are asked by `routed_rows`.

    Args:
        leader: a block; always run before the other.
        follower: the same block of the other model, in which the router returns what the leader's returned last.
        experts: name of the experts within the blocks.
    """
    routers = [_router_asked(block, experts) for block in (leader, follower)]
    last: list[Any] = []

    def note(_module: nn.Module, _args: Any, output: Any) -> None:
        last[:] = [output]

    with ExitStack() as stack:
        for router, hook in zip(routers, (note, lambda *_: last[0]), strict=True):
            if router is not None:
                stack.callback(router.register_forward_hook(hook).remove)
        yield


def _router_asked(block: nn.Module, name: str) -> nn.Module | None:
    """Return the router of experts that are not told which tokens they get; None for those that are."""
    experts = block.get_submodule(name)
    assert isinstance(experts, UnfusedExperts)
    return (
        None
        if experts.layout.kind.routed
        else find_router(block.get_submodule(name.rpartition(".")[0]), experts.layout)
    )


@contextmanager
def visiting(module: nn.Module, visits: Visits) -> Iterator[None]:
    """Let experts read more tokens than are routed to them while the context is active; results stay the same.

    Args:
        module: contains the experts.
        visits: `each` gives a token to experts without any, so that hooks see all experts; `all` gives all tokens to
            all of them.
    """
    found = [part for part in module.modules() if isinstance(part, UnfusedExperts)]
    try:
        for part in found:
            part.visits = visits
        yield
    finally:
        for part in found:
            part.visits = "routed"
