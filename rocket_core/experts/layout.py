"""How transformers stores the experts of a block: three-dimensional parameters, recognised by names and shapes."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

# Attributes that transformers gives to modules whose forward pass has the arguments (states, indices, weights).
_MARKS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "num_experts", "_apply_gate")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertPart:
    """A tensor of one expert within a parameter of all experts.

    Attributes:
        parameter: name of the parameter in its module.
        expert: index of the expert.
        transposed: whether matrices are stored as `(d_in, d_out)`.
        half: 0 for gate and 1 for up where both are in one parameter, else None.
        interleaved: whether the outputs of gate and up alternate; otherwise all of gate come first.
    """

    parameter: str
    expert: int
    transposed: bool = False
    half: int | None = None
    interleaved: bool = False

    def of(self, fused: Tensor) -> Tensor:
        """Return the view of the parameter's tensor that is this part, as `nn.Linear` has it: `(d_out, d_in)`."""
        return self.within(fused[self.expert])

    def within(self, expert: Tensor) -> Tensor:
        """Return the view of the tensor of this part's expert alone."""
        rows = expert.mT if self.transposed and expert.ndim == 2 else expert
        if self.half is None:
            return rows
        return rows[self.half :: 2] if self.interleaved else rows.chunk(2)[self.half]


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedParameter:
    """A parameter that holds a tensor of every expert.

    Attributes:
        shape: its shape.
        parts: its parts, by the names that they have in the unfused model.
    """

    shape: tuple[int, ...]
    parts: Mapping[str, ExpertPart]

    def as_stored(self, shape: tuple[int, ...]) -> "FusedParameter":
        """Return the same with the last two axes exchanged if a file has it so, as `transformers` reads it.

        Args:
            shape: shape of the tensor in the file.
        """
        turned = (*self.shape[:1], *reversed(self.shape[1:]))
        if shape == self.shape or shape != turned or len(shape) != 3:
            return self
        parts = {name: replace(part, transposed=not part.transposed) for name, part in self.parts.items()}
        return FusedParameter(shape=turned, parts=parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsLayout:
    """How a module stores its experts.

    Attributes:
        experts: number of experts.
        hidden: inputs and outputs of an expert.
        inner: outputs of gate and up.
        gated: whether there is a gate; otherwise the activation function is applied to up.
        biased: whether the layers have biases.
        transposed: whether matrices are stored as `(d_in, d_out)`.
        interleaved: whether the outputs of gate and up alternate.
        routed: whether the module is called with the experts of each token and their weights; otherwise with the
            states of all tokens for the first expert, for the second, and so on, which are zero if not routed to it.
    """

    experts: int
    hidden: int
    inner: int
    gated: bool
    biased: bool
    transposed: bool
    interleaved: bool
    routed: bool

    @property
    def first(self) -> str:
        """Name of the parameter that reads the states."""
        return "gate_up_proj" if self.gated else "up_proj"

    @property
    def projections(self) -> tuple[str, ...]:
        """Names of an expert's layers."""
        return ("gate_proj", "up_proj", "down_proj") if self.gated else ("up_proj", "down_proj")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each parameter of the module."""
        width = 2 * self.inner if self.gated else self.inner
        first, second = (width, self.hidden), (self.hidden, self.inner)
        weights = {self.first: first, "down_proj": second}
        shapes = {
            name: (self.experts, *(reversed(shape) if self.transposed else shape)) for name, shape in weights.items()
        }
        biases = {f"{name}_bias": (self.experts, shape[0]) for name, shape in weights.items()}
        return shapes | (biases if self.biased else {})

    def parts(self) -> Iterator[tuple[str, ExpertPart]]:
        """Yield the parts of all parameters, each with its name in the unfused module: `3.gate_proj.weight`."""
        kinds = (("weight", ""), ("bias", "_bias")) if self.biased else (("weight", ""),)
        for expert in range(self.experts):
            for projection in self.projections:
                fused = "down_proj" if projection == "down_proj" else self.first
                half = ("gate_proj", "up_proj").index(projection) if fused == "gate_up_proj" else None
                for kind, suffix in kinds:
                    yield (
                        f"{expert}.{projection}.{kind}",
                        ExpertPart(
                            parameter=f"{fused}{suffix}",
                            expert=expert,
                            transposed=self.transposed,
                            half=half,
                            interleaved=self.interleaved,
                        ),
                    )


def find_layout(module: nn.Module) -> ExpertsLayout | None:
    """Return how a module stores experts; None if it stores none, or in a way that is not known."""
    shapes = {name: tuple(value.shape) for name, value in module._parameters.items() if value is not None}
    marked = all(hasattr(module, name) for name in _MARKS)
    down = shapes.get("down_proj", ())
    if len(down) != 3 or len(shapes) < len(list(module.parameters())) or next(module.buffers(), None) is not None:
        return None
    gated = "gate_up_proj" in shapes
    if not marked and not (gated and _takes_states_alone(module) and hasattr(module, "act_fn")):
        return None
    # Without a mark only gated experts are known, whose shapes tell.
    transposed = bool(module.is_transposed) if marked else shapes["gate_up_proj"] == (down[0], down[2], 2 * down[1])
    inner, hidden = down[1:] if transposed else reversed(down[1:])
    layout = ExpertsLayout(
        experts=down[0],
        hidden=hidden,
        inner=inner,
        gated=gated,
        biased="down_proj_bias" in shapes,
        transposed=transposed,
        interleaved=marked and not module.is_concatenated,
        routed=marked,
    )
    return layout if shapes == layout.shapes() else None


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
