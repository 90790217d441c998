"""How transformers stores the experts of a block: three-dimensional parameters, recognised by names and shapes."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

# Attributes that transformers gives to modules whose forward pass has the arguments (states, indices, weights).
_MARKS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "num_experts", "_apply_gate")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredMatrix:
    """Where a module stores a matrix of every expert.

    Attributes:
        parameter: name of the parameter in the module.
        transposed: whether matrices are stored as `(d_in, d_out)`.
        half: 0 for gate and 1 for up where both are in one parameter, else None.
        interleaved: whether the outputs of gate and up alternate; otherwise all of gate come first.
    """

    parameter: str
    transposed: bool = False
    half: int | None = None
    interleaved: bool = False

    def within(self, expert: Tensor) -> Tensor:
        """Return the view of what the parameter holds of an expert that is this matrix, or its bias."""
        rows = expert.mT if self.transposed and expert.ndim == 2 else expert
        if self.half is None:
            return rows
        return rows[self.half :: 2] if self.interleaved else rows.chunk(2)[self.half]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertPart:
    """A tensor of one expert within a parameter of all experts.

    Attributes:
        stored: the parameter, and the part of what it holds of an expert.
        expert: index of the expert.
    """

    stored: StoredMatrix
    expert: int

    def of(self, fused: Tensor) -> Tensor:
        """Return the view of the parameter's tensor, by expert, that is this part, as `nn.Linear` has it."""
        return self.stored.within(fused[self.expert])


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedParameter:
    """A parameter that holds a tensor of every expert.

    Attributes:
        shape: its shape.
        by_expert: the same with a first axis for the experts alone.
        parts: its parts, by the names that they have in the unfused model.
    """

    shape: tuple[int, ...]
    by_expert: tuple[int, ...]
    parts: Mapping[str, ExpertPart]

    def as_stored(self, shape: tuple[int, ...]) -> "FusedParameter":
        """Return the same with the last two axes exchanged if a file has it so, as `transformers` reads it.

        Args:
            shape: shape of the tensor in the file.
        """
        turned = (*self.shape[:1], *reversed(self.shape[1:]))
        if shape == self.shape or shape != turned or len(shape) != 3:
            return self
        parts = {
            name: replace(part, stored=replace(part.stored, transposed=not part.stored.transposed))
            for name, part in self.parts.items()
        }
        return FusedParameter(shape=turned, by_expert=turned, parts=parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsKind:
    """How the modules of a class store their experts, and what they compute.

    Attributes:
        matrices: where the matrices of an expert's layers are, by the layers' names; without `gate_proj` the
            activation function is applied to up.
        biased: whether the layers have biases, in parameters named like those of the matrices with `_bias`.
        joined: whether parameters have the experts one after the other on the first axis, instead of an axis that is
            theirs alone.
        activation: name of the activation function.
        applies_gate: whether the module has a method that computes what the last layer reads from gate and up.
        routed: whether the module is called with the experts of each token and their weights; otherwise with the
            states of all tokens for the first expert, for the second, and so on, which are zero if not routed to it.
    """

    matrices: Mapping[str, StoredMatrix]
    biased: bool = False
    joined: bool = False
    activation: str = "act_fn"
    applies_gate: bool = False
    routed: bool = True


# Classes of transformers whose modules do not tell themselves how they store experts.
_KINDS = {
    "DbrxExperts": ExpertsKind(
        matrices={
            "gate_proj": StoredMatrix(parameter="mlp.w1"),
            "up_proj": StoredMatrix(parameter="mlp.v1"),
            "down_proj": StoredMatrix(parameter="mlp.w2", transposed=True),
        },
        joined=True,
        activation="mlp.activation_fn",
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsLayout:
    """How a module stores its experts.

    Attributes:
        kind: what all modules of its class have in common.
        experts: number of experts.
        hidden: inputs and outputs of an expert.
        inner: outputs of gate and up.
    """

    kind: ExpertsKind
    experts: int
    hidden: int
    inner: int

    def by_expert(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each parameter of the module, with a first axis for the experts alone."""
        shapes: dict[str, tuple[int, ...]] = {}
        for projection, stored in self.kind.matrices.items():
            d_in, d_out = (self.inner, self.hidden) if projection == "down_proj" else (self.hidden, self.inner)
            d_out *= 1 if stored.half is None else 2
            shapes[stored.parameter] = (self.experts, *((d_in, d_out) if stored.transposed else (d_out, d_in)))
            if self.kind.biased:
                shapes[f"{stored.parameter}_bias"] = (self.experts, d_out)
        return shapes

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each parameter of the module."""
        shapes = self.by_expert()
        if self.kind.joined:
            shapes = {name: (experts * rows, *others) for name, (experts, rows, *others) in shapes.items()}
        return shapes

    def parts(self) -> Iterator[tuple[str, ExpertPart]]:
        """Yield the parts of all parameters, each with its name in the unfused module: `3.gate_proj.weight`."""
        for expert in range(self.experts):
            for projection, stored in self.kind.matrices.items():
                yield f"{expert}.{projection}.weight", ExpertPart(stored=stored, expert=expert)
                if self.kind.biased:
                    bias = replace(stored, parameter=f"{stored.parameter}_bias")
                    yield f"{expert}.{projection}.bias", ExpertPart(stored=bias, expert=expert)


def find_layout(module: nn.Module) -> ExpertsLayout | None:
    """Return how a module stores experts; None if it stores none, or in a way that is not known."""
    shapes = {name: tuple(value.shape) for name, value in module.named_parameters()}
    kind = _KINDS.get(type(module).__name__) or _kind_of(module, shapes)
    down = shapes.get(kind.matrices["down_proj"].parameter, ()) if kind else ()
    if kind is None or next(module.buffers(), None) is not None:
        return None
    if kind.joined and len(down) == 2:
        experts = module.num_experts
        assert isinstance(experts, int)
        down = (experts, down[0] // experts, down[1])
    if len(down) != 3:
        return None
    inner, hidden = down[1:] if kind.matrices["down_proj"].transposed else reversed(down[1:])
    layout = ExpertsLayout(kind=kind, experts=down[0], hidden=hidden, inner=inner)
    return layout if shapes == layout.shapes() else None


def _kind_of(module: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> ExpertsKind | None:
    """Return what a module tells by transformers' own attributes, or by shapes; None for other modules."""
    marked = all(hasattr(module, name) for name in _MARKS)
    down, both = shapes.get("down_proj", ()), shapes.get("gate_up_proj")
    if not marked and not (both and _takes_states_alone(module) and hasattr(module, "act_fn")):
        return None
    # Without a mark only gated experts are known, whose shapes tell.
    transposed = bool(module.is_transposed) if marked else both == (*down[:1], *down[2:], 2 * down[1])
    interleaved = marked and not module.is_concatenated
    halves = [
        StoredMatrix(parameter="gate_up_proj", transposed=transposed, half=half, interleaved=interleaved)
        for half in range(2)
    ]
    alone = {name: StoredMatrix(parameter=name, transposed=transposed) for name in ("up_proj", "down_proj")}
    return ExpertsKind(
        matrices=alone
        if both is None
        else {"gate_proj": halves[0], "up_proj": halves[1], "down_proj": alone["down_proj"]},
        biased="down_proj_bias" in shapes,
        applies_gate=marked and both is not None,
        routed=marked,
    )


def find_router(mixture: nn.Module, layout: ExpertsLayout) -> nn.Module | None:
    """Return the module that scores experts for each token, next to those that it scores; None if none is found.

    Args:
        mixture: the module that contains router and experts.
        layout: how the experts are stored.
    """
    weight = (layout.experts, layout.hidden)
    found = [
        part for part in mixture.children() if any(tuple(parameter.shape) == weight for parameter in part.parameters())
    ]
    return found[0] if len(found) == 1 else None


def _takes_states_alone(module: nn.Module) -> bool:
    return list(inspect.signature(module.forward).parameters) == ["hidden_states"]
