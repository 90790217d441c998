"""Refinement of compressed blocks: what their layers store is tuned together, towards what the dense model computes."""

import copy
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rocket_core.checkpoint import PartEntry, TensorEntry
from rocket_core.checkpoint.reader import DTYPES
from rocket_core.errors import InvalidConfigError
from rocket_core.hf.names import StockLayer
from rocket_core.hf.replacement import empty_layer
from rocket_core.layers import CODED_FACTOR_NAMES, FactorizedLinear, LayerEntry, StoredLinear, layer_tensors
from rocket_core.models.architecture import oriented_weight
from rocket_core.models.block_calls import Activations
from rocket_core.models.recorded_call import replace_tensors, to_float32
from rocket_core.pipeline.context import Run
from rocket_core.pipeline.stages.sequential.continuation import continuation
from rocket_core.pipeline.stages.stored_weight import install_weight, read_codes, stored_blocks, stored_tensors
from rocket_core.pipeline.stages.units import CompressionUnit
from rocket_core.pipeline.state.records import RefinedBlock
from rocket_core.pipeline.state.work_folder import WorkFolder
from rocket_core.refinement import BlockTuning, LearntCodes, open_values

REFINED_BATCHES = 8
"""Batches that the calibration samples should make at least, as one in eight is held out."""
REFINED_TOKENS_ON_CPU = 1024
"""Positions in a batch of refinement on a CPU, which takes as long for half of them in twice as many steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressedBlock:
    """A compressed block within the compressed model.

    Attributes:
        index: index of the block in the model.
        module: the block, with the dense weights of its compressed layers.
        dense: the same block of the dense model.
        units: its compressed layers.
    """

    index: int
    module: nn.Module
    dense: nn.Module
    units: Sequence[CompressionUnit]

    @property
    def names(self) -> list[str]:
        """The compressed layers."""
        return [name for unit in self.units for name in unit.names]


class Refinement:
    """Refinement of the blocks of a run, each after all its layers are compressed.

    What the layers of a block store as numbers, the codes of those that are quantized, and the norms and biases are
    tuned together, given the inputs of the block in the compressed model: towards what the dense model makes of it, see
    `continuation`, and a little towards the dense block's output. Memory is that of nine more copies of a block in
    float32, and of one of the next block.

    Args:
        run: the run.
        work: work folder with the compressed layers, whose tensors are replaced.
        batches: returns the arguments of the model, by batch.
    """

    def __init__(self, run: Run, work: WorkFolder, batches: Callable[[], Iterable[Mapping[str, Tensor]]]) -> None:
        self._run = run
        self._work = work
        self._batches = batches

    def is_finished(self, index: int) -> bool:
        """Return whether a block is refined."""
        return self._work.refined(index) is not None

    def refine(
        self, block: CompressedBlock, states: Activations, dense: Activations, on_step: Callable[[float], None]
    ) -> Mapping[str, int]:
        """Refine a block unless it is refined, and put the result in place in the block and the work folder.

        Args:
            block: the block.
            states: the inputs of the block in the compressed model.
            dense: the stream of the dense model, at the output of the block.
            on_step: called before each step with the completed part; may raise an error to stop.

        Returns:
            The bytes that each of its layers takes now.

        Raises:
            InvalidConfigError: there are too few calibration samples to hold some out.
        """
        if not self.is_finished(block.index):
            self._tune(block, states, dense, on_step)
        return self.apply(block).stored_bytes

    def _tune(
        self, block: CompressedBlock, states: Activations, dense: Activations, on_step: Callable[[float], None]
    ) -> None:
        if len(dense.hidden) == 1:
            raise InvalidConfigError(
                "refine holds out a part of the calibration samples: take at least 2 samples, or leave refine out"
            )
        trained = self._opened(block)
        vectors = self._vectors(block, trained)
        stored = {name: DTYPES[entry.dtype] for name, entry in vectors.items()}
        for name, parameter in trained.named_parameters():
            learnt = name.endswith(".position")
            if self._is_of_weight(block, name) and parameter.is_floating_point() and not learnt:
                stored[name] = self._run.dtype
            parameter.requires_grad_(learnt or name in stored)
        calls = [replace_tensors(calls[block.index - states.first], to_float32) for calls in states.calls]

        def predict(batch: int) -> Tensor:
            call = calls[batch]
            returned = trained(states.hidden[batch].float(), *call.args, **call.kwargs)
            return states.output_of(returned, block.index, batch)

        with continuation(self._run, block.index, dense, self._batches) as further, torch.enable_grad():
            tuning = BlockTuning(trained, predict, dense.hidden, stored, further)
            errors = tuning.complete(seed=block.index, on_step=on_step)
        tensors, codes = self._stored_form(block, trained, vectors)
        record = RefinedBlock(
            codes=codes,
            stored_bytes={
                name: sum(tensors[key].nbytes for key in _keys(name, tensors).values()) for name in block.names
            },
            vectors={f"{self._prefix(block.index)}{name}": entry.key for name, entry in vectors.items()},
            error_before=errors.before,
            error_after=errors.after,
        )
        self._work.save_refined(block.index, tensors, record)

    def _opened(self, block: CompressedBlock) -> nn.Module:
        """Return a copy of a block whose layers are as stored, opened for training."""
        trained = copy.deepcopy(block.module)
        layers: dict[str, nn.Module] = {}
        for unit in block.units:
            for name in unit.names:
                if stored_blocks(self._work, name) is None:
                    within = self._within(block.index, name)
                    stock = trained.get_submodule(within)
                    assert isinstance(stock, nn.Linear | Conv1D), "layers are linear"
                    layers[name] = self._stored_layer(unit, name, stock, block, layers)
                    trained.set_submodule(within, layers[name])
        open_values(trained)
        return trained

    def _stored_layer(
        self,
        unit: CompressionUnit,
        name: str,
        stock: StockLayer,
        block: CompressedBlock,
        layers: Mapping[str, nn.Module],
    ) -> nn.Module:
        """Return the module of a compressed layer in the form to train.

        Args:
            unit: the layer's unit.
            name: the layer.
            stock: the layer with its dense weight.
            block: the block.
            layers: layers before it, among them the owner of its dictionary if that is another one.
        """
        codes = self._work.codes(name)
        if codes is not None and codes.is_quantized:
            dense = oriented_weight(block.dense.get_submodule(self._within(block.index, name))).T
            rounded = read_codes(self._work, name, self._run.architecture.shape(name))
            bias = stock.bias
            assert bias is None or isinstance(bias, nn.Parameter), "biases are parameters"
            return LearntCodes(rounded, dense, bias).to(self._run.device)
        tensors = {part: entry.read() for part, entry in stored_tensors(self._work, name).items()}
        candidate = unit.candidates[unit.names.index(name)]
        owner = unit.names[0] if candidate.dictionary is not None and name != unit.names[0] else None
        if codes is None:
            entry = LayerEntry(rank=candidate.rank, nnz=tensors["weight"].numel(), dictionary=owner)
        else:
            entry = LayerEntry(**(codes.model_dump() | {"dictionary": owner}))
        owning = None if owner is None else layers[owner]
        assert owning is None or isinstance(owning, FactorizedLinear), "an owner has a dictionary"
        layer = empty_layer(stock, entry, name, owning)
        layer.load_state_dict(tensors, strict=False, assign=True)
        layer.bias = stock.bias
        return layer.to(self._run.device)

    def _vectors(self, block: CompressedBlock, trained: nn.Module) -> dict[str, TensorEntry]:
        """Return the norms and biases of a block, by parameter, with their place in the checkpoint.

        Matrices that stay dense have no error to make up for, and others may be read by other blocks as well.
        """
        found: dict[str, TensorEntry] = {}
        for name, parameter in trained.named_parameters():
            entry = self._run.loader.entry(f"{self._prefix(block.index)}{name}")
            own = not self._is_of_weight(block, name) and parameter.dim() == 1
            if own and entry is not None and not isinstance(entry, PartEntry):
                found[name] = entry
        return found

    def _stored_form(
        self, block: CompressedBlock, trained: nn.Module, vectors: Mapping[str, TensorEntry]
    ) -> tuple[dict[str, Tensor], dict[str, LayerEntry]]:
        """Return the tensors of a trained block as they are stored, and how the codes of its layers are."""
        tensors = {
            entry.key: trained.get_parameter(name).detach().to("cpu", DTYPES[entry.dtype])
            for name, entry in vectors.items()
        }
        codes: dict[str, LayerEntry] = {}
        for name in block.names:
            layer = trained.get_submodule(self._within(block.index, name))
            entry = self._work.codes(name)
            parts: Mapping[str, Tensor] = {}
            if isinstance(layer, LearntCodes):
                rounded = layer.rounded()
                parts = layer_tensors(rounded, self._run.dtype)
                coded_bytes = parts["weight"].numel() if rounded.entropy_coded else None
                entry = LayerEntry.of_codes(rounded.scales.format, rounded.scales.exponent, coded_bytes)
            elif isinstance(layer, StoredLinear):
                parts = {part: tensor.detach() for part, tensor in layer.state_dict().items() if part != "bias"}
            tensors |= {f"{name}.{part}": _as_stored(tensor, self._run.dtype) for part, tensor in parts.items()}
            if parts and entry is not None:
                codes[name] = entry
        return tensors, codes

    def apply(self, block: CompressedBlock) -> RefinedBlock:
        """Put the tensors of a refined block in place; a run that was stopped at it does the same again."""
        record = self._work.refined(block.index)
        assert record is not None
        tensors = self._work.refined_tensors(block.index)
        for name, key in record.vectors.items():
            parameter = block.module.get_parameter(name.removeprefix(self._prefix(block.index)))
            parameter.detach().copy_(tensors.pop(key).read())
        for unit in block.units:
            for name in unit.names:
                parts = {part: tensors[key].read() for part, key in _keys(name, tensors).items()}
                if parts:
                    self._work.save_factors(name, parts, codes=record.codes.get(name))
        for unit in block.units:
            for name in unit.names:
                module = block.module.get_submodule(self._within(block.index, name))
                install_weight(self._run, self._work, unit, name, module)
        return record

    def _is_of_weight(self, block: CompressedBlock, parameter: str) -> bool:
        """Return whether a parameter of a block is a part of the stored weight of a compressed layer."""
        layer, _, part = parameter.rpartition(".")
        return part != "bias" and f"{self._prefix(block.index)}{layer}" in block.names

    def _prefix(self, index: int) -> str:
        return f"{self._run.architecture.block_name(index)}."

    def _within(self, index: int, name: str) -> str:
        """Return the name of a layer within its block."""
        return name.removeprefix(self._prefix(index))


def _keys(layer: str, tensors: Container[str]) -> dict[str, str]:
    """Return the names of a layer's tensors, by their part after the layer's name."""
    return {part: key for part in CODED_FACTOR_NAMES if (key := f"{layer}.{part}") in tensors}


def _as_stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype).cpu() if tensor.is_floating_point() else tensor.cpu()
