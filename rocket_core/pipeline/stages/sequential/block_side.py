"""A block of the dense or of the compressed model while sequential compression passes through it."""

from collections.abc import Mapping
from contextlib import suppress

from jaxtyping import Float
from torch import Tensor, nn

from rocket_core.calibration.grams import first_input
from rocket_core.models.block_calls import Activations
from rocket_core.models.part_cache import FinishedParts


class _InputReachedError(Exception):
    """Signal that ends a forward pass whose rest is not needed."""


class BlockSide:
    """A block of the dense or of the compressed model, with the stream that passes through it.

    Args:
        block: the block, with its weights.
        index: index of the block in the model.
        states: the stream.
        layers: the block's layers by name.

    Attributes:
        block: the block.
        states: the stream.
        layers: the block's layers by name.
    """

    def __init__(self, block: nn.Module, index: int, states: Activations, layers: Mapping[str, nn.Module]) -> None:
        self.block = block
        self.states = states
        self._index = index
        self.layers = layers
        within = {id(module): name for name, module in block.named_modules()}
        self._finished = FinishedParts(block, [within[id(layer)] for layer in layers.values()])

    def forget(self) -> None:
        """Remove what is cached of the block, because its weights have changed."""
        self._finished.clear()

    @property
    def batches(self) -> int:
        """Number of batches."""
        return len(self.states.hidden)

    def step(self, batch: int) -> None:
        """Pass a batch through the block, and keep the result."""
        with self._finished.passing(batch, self.states.hidden[batch]):
            self.states.step(self.block, self._index, batch)

    def run(self, batch: int) -> None:
        """Pass a batch through the block, without keeping anything."""
        self.states.run(self.block, self._index, batch)

    def arguments(self, module: str, batch: int) -> tuple[Tensor, ...]:
        """Return the arguments of a module of the block, when a batch that passes through the block has reached it."""
        found: list[tuple[Tensor, ...]] = []

        def note(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            self._finished.reached()
            found.append(args)
            raise _InputReachedError

        handle = self.block.get_submodule(module).register_forward_pre_hook(note)
        try:
            with self._finished.passing(batch, self.states.hidden[batch]), suppress(_InputReachedError):
                self.states.run(self.block, self._index, batch)
        finally:
            handle.remove()
        return found[0]

    def inputs(
        self, name: str, batch: int, *, stop_at_first: bool, for_good: bool = False
    ) -> list[Float[Tensor, "rows d_in"]]:
        """Return what a layer reads, one tensor per call, while a batch passes through the block.

        Args:
            name: the layer.
            batch: number of the batch.
            stop_at_first: stop at the first call.
            for_good: pass the batch through the block, as `step` does; takes precedence over `stop_at_first`.
        """
        rows: list[Tensor] = []

        def note(_module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            self._finished.reached()
            tensor = first_input(args, kwargs).detach()
            rows.append(tensor.reshape(-1, tensor.shape[-1]))
            if stop_at_first and not for_good:
                raise _InputReachedError

        handle = self.layers[name].register_forward_pre_hook(note, with_kwargs=True)
        try:
            with self._finished.passing(batch, self.states.hidden[batch]), suppress(_InputReachedError):
                if for_good:
                    self.states.step(self.block, self._index, batch)
                else:
                    self.states.run(self.block, self._index, batch)
        finally:
            handle.remove()
        return rows
