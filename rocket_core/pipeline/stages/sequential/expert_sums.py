"""Sums over what the experts of a block read in the dense and in the compressed model, for sequential compression.

Hidden states of the compressed model differ, and its routers may send a token elsewhere. An expert is compressed for
the tokens that the dense model sends to it, which are the same rows in both streams; where routers scale what experts
read (Llama 4), by the scores of the dense model. As in the statistics of experts
(`rocket_core.calibration.experts`), as many tokens of the block's average are added as its covariance has
effective ranks, in the dense model.

All experts are summed up in the same pass over the calibration windows, as far as there is memory for their sums: first
what their first layers read, and when all of those are compressed, what their last ones read.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from rocket_core.calibration.experts import SAMPLE_TOKENS, effective_rank, find_experts
from rocket_core.experts import Expert, UnfusedExperts, following_router
from rocket_core.pipeline.stages.sequential.block_side import BlockSide
from rocket_core.pipeline.stages.sequential.cross_sums import CrossSums, HalfSums

# Sums of several experts that are held at a time; a single one may be larger.
_MOST_BYTES = 2**27


def _with_average(sums: CrossSums, average: CrossSums) -> CrossSums:
    """Return sums and those of as many average tokens as their covariance has effective ranks."""
    total = average.tokens
    added = max(1, round(effective_rank(average.dense_gram / total)))
    part = added / total
    halves = tuple(HalfSums(gram=part * half.gram, cross=part * half.cross) for half in average.halves)
    # None of an expert to which no token is routed.
    for half, own in zip(halves, sums.halves, strict=False):
        half.gram += own.gram
        half.cross += own.cross
    return CrossSums(tokens=sums.tokens + added, dense_gram=sums.dense_gram + part * average.dense_gram, halves=halves)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLayer:
    """A layer of an expert, in both models.

    Attributes:
        name: its name in the model.
        module: name of the module of experts within the block.
        expert: number of the expert.
        is_last: whether it reads what the expert's first layers return.
        d_in: numbers that it reads for a token.
    """

    name: str
    module: str
    expert: int
    is_last: bool
    d_in: int


def expert_layers(names: Iterable[str], block: nn.Module, prefix: str) -> dict[str, ExpertLayer]:
    """Return those layers of a block that are of experts, by name.

    Args:
        names: names of layers in the model.
        block: the block.
        prefix: name of the block, with a dot at its end.
    """
    found: dict[str, ExpertLayer] = {}
    for module, experts in find_experts(block, "").items():
        for name in names:
            expert, _, projection = name.removeprefix(f"{prefix}{module}.").partition(".")
            if name.startswith(f"{prefix}{module}.") and expert.isdecimal():
                is_last = projection == "down_proj"
                found[name] = ExpertLayer(
                    name=name,
                    module=module,
                    expert=int(expert),
                    is_last=is_last,
                    d_in=experts.layout.inner if is_last else experts.layout.hidden,
                )
    return found


class ExpertSums:
    """The sums of the layers of a block's experts, one per group of layers that read the same input.

    Args:
        layers: the layers, in the order in which they are asked for: the first layers of experts, then the last ones.
        dense: the block of the dense model.
        compressed: that of the compressed model.
        dtype: dtype of products.
        everywhere: whether all tokens count as routed to every expert.
        on_batch: called before each batch.
    """

    def __init__(
        self,
        layers: Sequence[ExpertLayer],
        dense: BlockSide,
        compressed: BlockSide,
        *,
        dtype: torch.dtype,
        everywhere: bool,
        on_batch: Callable[[], None],
    ) -> None:
        self._layers = list(layers)
        self._dense = dense
        self._compressed = compressed
        self._dtype = dtype
        self._everywhere = everywhere
        self._on_batch = on_batch
        self._ready: dict[str, CrossSums] = {}
        self._averages: dict[str, CrossSums] = {}

    def of(self, layer: ExpertLayer) -> CrossSums:
        """Return the sums of a layer. The layers that precede it in its expert are compressed."""
        if layer.name not in self._ready:
            self._ready = self._sum(self._with_the_next(layer))
        return self._ready.pop(layer.name)

    def _with_the_next(self, layer: ExpertLayer) -> list[ExpertLayer]:
        """Return a layer, and as many after it as can be summed up in the same pass within the memory for it."""
        after = self._layers[self._layers.index(layer) :]
        alike = [other for other in after if (other.module, other.is_last) == (layer.module, layer.is_last)]
        matrices = 10 if layer.is_last else 5
        return alike[: max(1, _MOST_BYTES // (matrices * layer.d_in**2 * 8))]

    def _sum(self, layers: Sequence[ExpertLayer]) -> dict[str, CrossSums]:
        own = {layer.name: CrossSums() for layer in layers}
        # What enters is the same for all experts.
        averaged = layers if layers[0].is_last else [] if layers[0].module in self._averages else layers[:1]
        averages = {layer.name: CrossSums() for layer in averaged}
        for rows, dense_rows, routes in self._entering(layers[0].module):
            stride = max(1, len(rows) * self._dense.batches // SAMPLE_TOKENS) if layers[0].is_last else 1
            for layer in averaged:
                averages[layer.name].add(*self._read(layer, rows[::stride], dense_rows[::stride]))
            for layer in layers:
                chosen = routes[layer.expert]
                if len(chosen):
                    own[layer.name].add(*self._read(layer, rows[chosen], dense_rows[chosen]))
        if self._everywhere:
            return own
        if averaged and not layers[0].is_last:
            self._averages[layers[0].module] = averages[layers[0].name]
        return {
            layer.name: _with_average(
                own[layer.name], averages[layer.name] if layer.is_last else self._averages[layer.module]
            )
            for layer in layers
        }

    def _read(
        self, layer: ExpertLayer, rows: Float[Tensor, "rows hidden"], dense_rows: Float[Tensor, "rows hidden"]
    ) -> tuple[Float[Tensor, "rows d_in"], Float[Tensor, "rows d_in"]]:
        """Return what a layer reads in the compressed and in the dense model, given what enters its expert."""
        if layer.is_last:
            with torch.no_grad():
                rows = _expert_of(layer, self._compressed).inner(rows)
                dense_rows = _expert_of(layer, self._dense).inner(dense_rows)
        return rows.to(self._dtype), dense_rows.to(self._dtype)

    def _entering(self, module: str) -> Iterator[tuple[Tensor, Tensor, list[Int[Tensor, " n"]]]]:
        """Yield what enters experts in the compressed and in the dense model, and which rows each expert reads."""
        experts = _experts_of(module, self._dense)
        for batch in range(self._dense.batches):
            self._on_batch()
            with following_router(self._dense.block, self._compressed.block, module):
                states, *routing = self._dense.arguments(module, batch)
                others, *_ = self._compressed.arguments(module, batch)
            rows, dense_rows = experts.entering(others, like=states), experts.entering(states)
            everyone = torch.arange(len(rows), device=rows.device)
            routes = [everyone] * len(experts) if self._everywhere else experts.routed_rows(states, *routing)
            yield rows, dense_rows, routes


def _experts_of(module: str, side: BlockSide) -> UnfusedExperts:
    experts = side.block.get_submodule(module)
    assert isinstance(experts, UnfusedExperts)
    return experts


def _expert_of(layer: ExpertLayer, side: BlockSide) -> Expert:
    expert = _experts_of(layer.module, side)[layer.expert]
    assert isinstance(expert, Expert)
    return expert
