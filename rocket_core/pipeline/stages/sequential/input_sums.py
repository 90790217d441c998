"""Sums over what the layers of a block read in the dense and in the compressed model, for sequential compression.

In a decoder, the output of some layers is added to the residual stream, which deviates from that of the dense model by
then. The sums of such a layer include the deviation, so that it can compensate for it.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TypeVar

import torch

from rocket_core.models.called_lists import called_list_of, following_calls
from rocket_core.models.residual_stream import ResidualStream, StreamState, find_residual_stream
from rocket_core.pipeline.stages.sequential.block_side import BlockSide
from rocket_core.pipeline.stages.sequential.cross_sums import CrossSums

_Sums = TypeVar("_Sums", bound=CrossSums)


class InputSums:
    """The sums of a block's layers, one per group of layers that read the same input; not those of its experts.

    Args:
        dense: the block of the dense model.
        compressed: that of the compressed model.
        dtype: dtype of products.
        on_batch: called before each batch.
        compensates: whether layers compensate for deviations of the residual stream.
    """

    def __init__(
        self,
        dense: BlockSide,
        compressed: BlockSide,
        *,
        dtype: torch.dtype,
        on_batch: Callable[[], None],
        compensates: bool,
    ) -> None:
        self._dense = dense
        self._compressed = compressed
        self._dtype = dtype
        self._on_batch = on_batch
        self._stream = None if compensates else ResidualStream()

    def add_to(self, sums: _Sums, name: str, *, alone: bool, for_good: bool) -> _Sums:
        """Add what a layer reads to sums, and return them. The layers called before it are compressed.

        Args:
            sums: empty sums.
            name: the layer.
            alone: whether no other layer reads the same; else each would compensate for all of a deviation.
            for_good: take the dense stream to the next block.
        """
        stream = self._found_stream() if alone else ResidualStream()
        called_once = False
        experts = called_list_of(self._dense.block, self._dense.layers[name])
        for batch in range(self._dense.batches):
            self._on_batch()
            with self._following_calls(experts), self._watching(stream, name, batch) as states:
                dense_calls = self._dense.inputs(name, batch, stop_at_first=called_once, for_good=for_good)
                called_once = len(dense_calls) == 1
                calls = self._compressed.inputs(name, batch, stop_at_first=called_once)
            rows, dense_rows = ([part.to(self._dtype) for part in found] for found in (calls, dense_calls))
            for both in zip(rows, dense_rows, strict=True):
                sums.add(*both)
            if states:
                dense_state, state = (found.rows.to(self._dtype) for found in states)
                sums.add_deviation(rows[0], dense_state - state)
        return sums

    def _following_calls(self, experts: str | None) -> AbstractContextManager[None]:
        """Let experts that are plain layers read, in the compressed model, what the dense model routes to them.

        Otherwise their rows in the two models would be of different tokens.
        """
        if experts is None:
            return nullcontext()
        return following_calls(*(side.block.get_submodule(experts) for side in (self._dense, self._compressed)))

    def _found_stream(self) -> ResidualStream:
        if self._stream is None:
            states = self._dense.states
            self._stream = find_residual_stream(
                self._dense.block, self._dense.layers, states.hidden[0], lambda: self._dense.run(0)
            )
        return self._stream

    @contextmanager
    def _watching(self, stream: ResidualStream, name: str, batch: int) -> Iterator[list[StreamState]]:
        """Observe the stream in both models until a layer is called, if its output is added to it."""
        with ExitStack() as stack:
            yield [
                stack.enter_context(stream.before(side.layers[name], side.block, side.states.hidden[batch]))
                for side in (self._dense, self._compressed)
                if name in stream.layers
            ]
