"""Statistics and sensitivities of experts, to which few or none of the tokens of a text may be routed.

Statistics are those of the tokens routed to an expert, shrunk towards those of all tokens of its block.

An expert of a mixture sees a part of the calibration tokens, often few, sometimes none. The covariance C of what a
layer reads, estimated from n tokens, has a relative squared error of about r / n, r = tr(C)² / ‖C‖² being its effective
rank. The covariance of all tokens of the block is known well, but is another one. So the weight n / (n + r) is given to
the expert's own estimate: as much to either where r tokens were seen and the error is as large as the covariance
itself. In sums: r tokens of the block's average are added to those of the expert.
"""

import functools
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rocket_core.calibration.grams import InputGroup
from rocket_core.experts import Expert, UnfusedExperts, is_expert_name
from rocket_core.linalg.gram_sum import add_gram, gram_matrix, symmetric
from rocket_core.linalg.whitening import GramStatistics
from rocket_core.models.architecture import oriented_weight

# Tokens of the block that every expert is run on, for what its last layer reads.
SAMPLE_TOKENS = 1024


@dataclass(kw_only=True, slots=True)
class _Inputs:
    """What enters the experts of one module.

    Attributes:
        tokens: number of tokens.
        gram: sum of xxᵀ over them, as by `add_gram`; None before the first.
        sample: some of them, by batch.
    """

    tokens: int = 0
    gram: Float[Tensor, "hidden hidden"] | None = None
    sample: list[Float[Tensor, "sampled hidden"]] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class ExpertInputs:
    """What enters the experts of a block, whichever expert it is routed to.

    Attributes:
        experts: the modules of experts by name.
        batches: number of batches.
        dtype: dtype of products, float32 or float64.
    """

    experts: Mapping[str, UnfusedExperts]
    batches: int
    dtype: torch.dtype
    _found: dict[str, _Inputs] = field(default_factory=dict)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Collect what enters the experts while the context is active."""
        with ExitStack() as hooks:
            for name, module in self.experts.items():
                hooks.enter_context(module.register_forward_pre_hook(functools.partial(self._add, name)))
            yield

    def shrunk(
        self, statistics: Mapping[str, GramStatistics], groups: Sequence[InputGroup]
    ) -> dict[str, GramStatistics]:
        """Return the statistics of all layers; those of experts are shrunk.

        Args:
            statistics: statistics of the block's layers, without those of experts to which nothing was routed; Gram
                matrices of experts are changed.
            groups: layers that share an input.
        """
        for inputs in self._found.values():
            if inputs.gram is not None:
                symmetric(inputs.gram)
        shrunk = dict(statistics)
        for group in groups:
            found = self._expert_of(group.layers[0])
            if found is not None:
                shrunk |= self._shrink(group, statistics, *found)
        return shrunk

    def _add(self, name: str, module: UnfusedExperts, args: tuple[Any, ...]) -> None:
        states = module.entering(args[0]).detach()
        stride = max(1, len(states) * self.batches // SAMPLE_TOKENS)
        found = self._found.setdefault(name, _Inputs())
        found.tokens += len(states)
        found.gram = add_gram(found.gram, states.to(self.dtype))
        found.sample.append(states[::stride].clone())

    def _expert_of(self, layer: str) -> tuple[_Inputs, Expert, str] | None:
        """Return what enters the module of a layer's expert, the expert, and the layer's name in it."""
        for name, inputs in self._found.items():
            index, _, projection = layer.removeprefix(f"{name}.").partition(".")
            if layer.startswith(f"{name}.") and index.isdecimal():
                expert = self.experts[name][int(index)]
                assert isinstance(expert, Expert)
                return inputs, expert, projection
        return None

    def _shrink(
        self,
        group: InputGroup,
        statistics: Mapping[str, GramStatistics],
        inputs: _Inputs,
        expert: Expert,
        projection: str,
    ) -> dict[str, GramStatistics]:
        if projection == "down_proj":
            with torch.no_grad():
                rows = expert.inner(torch.cat(inputs.sample)).to(self.dtype)
            covariance = gram_matrix(rows) / len(rows)
        else:
            assert inputs.gram is not None
            covariance = inputs.gram / inputs.tokens
        own = {name: statistics.get(name) for name in group.layers}
        if not group.from_output:
            first = shrink_to_block(own[group.layers[0]], covariance, None)
            return dict.fromkeys(group.layers, first)
        weights = {
            name: oriented_weight(expert.get_submodule(name.rpartition(".")[2])).double() for name in group.layers
        }
        return {name: shrink_to_block(own[name], covariance, weights[name]) for name in group.layers}


def find_experts(block: nn.Module, prefix: str) -> dict[str, UnfusedExperts]:
    """Return the modules of experts in a block, by their names in the model."""
    return {f"{prefix}{name}": part for name, part in block.named_modules() if isinstance(part, UnfusedExperts)}


def shrink_to_block(
    own: GramStatistics | None,
    covariance: Float[Tensor, "d_in d_in"],
    weight: Float[Tensor, "d_in d_out"] | None,
) -> GramStatistics:
    """Return an expert's statistics shrunk to the block's: G + r·C and n + r tokens.

    Args:
        own: the statistics of the n tokens routed to it, whose Gram matrix becomes that of the result; None if n is 0.
        covariance: C, the mean of xxᵀ over all tokens of the block, in float64.
        weight: W, in float64, if the Gram matrix of the output is collected; otherwise None.
    """
    added = max(1, round(effective_rank(covariance)))
    sums = added * (covariance if weight is None else weight.mT @ covariance @ weight)
    energy, routed = added * covariance.diagonal(), 0
    if own is not None:
        known = own.gram if weight is None else own.output_gram
        assert known is not None
        # In place, as those of a block's experts are gigabytes; the energy may be a view of the matrix.
        energy, routed = energy + own.input_energy, own.tokens
        sums = known.add_(sums)
    return GramStatistics(
        tokens=routed + added,
        routed=routed,
        gram=sums if weight is None else None,
        output_gram=None if weight is None else sums,
        input_energy=energy,
    )


def effective_rank(covariance: Float[Tensor, "d d"]) -> float:
    """Return tr(C)² / ‖C‖², the number of equal eigenvalues that a covariance with this spread would have; 0 if C is 0.

    n independent Gaussian vectors estimate C with an expected relative squared error of (1 + tr(C)² / ‖C‖²) / n.
    """
    norm = float(covariance.square().sum())
    return float(covariance.trace()) ** 2 / norm if norm > 0 else 0.0


def with_another_token(
    diagonals: Mapping[str, Float[Tensor, " d_out"]], modules: Collection[str], tokens: int
) -> dict[str, Float[Tensor, " d_out"]]:
    """Return Fisher diagonals of a block's layers as if one more token had been routed to each expert.

    An expert's diagonal is the sum of squared gradients over the tokens routed to it, divided by all tokens; without
    any it is zero, and nothing would be lost by removing the expert. Another text will use it. So the gradients of an
    average token are added: f + sum f' / tokens, the sum being over the experts' layers of the same kind.

    Args:
        diagonals: diagonal of each layer.
        modules: names of the modules of experts in the model.
        tokens: tokens of the text.

    Returns:
        The diagonals of all layers; those of other layers are unchanged.
    """
    siblings: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in diagonals:
        if is_expert_name(name, modules):
            expert, _, projection = name.rpartition(".")
            siblings[expert.rpartition(".")[0], projection].append(name)
    smoothed = dict(diagonals)
    for names in siblings.values():
        average = sum((diagonals[name] for name in names[1:]), diagonals[names[0]]) / tokens
        smoothed |= {name: diagonals[name] + average for name in names}
    return smoothed
