"""The stage that compresses the layers one after another, each for what the compressed layers before it produce.

Two streams of hidden states pass through the model: that of the dense model and that of the model as far as it is
compressed. A layer whose inputs are X in the one and X' in the other is compressed towards the dense output: the weight
that brings X' closest to XW is W* = (X'ᵀX')⁻¹X'ᵀX W, and that weight, under the Gram matrix of X', is what the method
is given. The errors of earlier layers are thereby made good where they can be, instead of adding up.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rocket_core.architectures import BlockList, oriented_weight
from rocket_core.calibration import InputGroup, find_input_groups, first_input
from rocket_core.devices import return_freed_memory
from rocket_core.footprint import TOKENS_PER_BATCH
from rocket_core.inputs import CalibrationInputs
from rocket_core.methods import LayerProblem
from rocket_core.modules import LayerFactors, compose_weight, unpack_coefficients
from rocket_core.pipeline.compression import Achieved, Unit, compress_unit, is_finished, save
from rocket_core.pipeline.preflight import Run
from rocket_core.pipeline.problems import layer_problem, naming_the_layer
from rocket_core.pipeline.progress import Monitor
from rocket_core.pipeline.walk import begin_walk, loaded_block, split_inputs
from rocket_core.pipeline.work_folder import WorkFolder
from rocket_core.recording import Activations
from rocket_core.whitening import GramStatistics, shrunk_gram

_Streams = tuple[Activations, Activations]


@dataclass(kw_only=True, slots=True)
class _CrossSums:
    """Running sums over the inputs X of a dense layer and X' of the same layer behind compressed ones, in float64.

    Attributes:
        tokens: rows.
        gram: X'ᵀX'.
        cross: X'ᵀX.
    """

    tokens: int = 0
    gram: Tensor = field(default_factory=lambda: torch.zeros(()))
    cross: Tensor = field(default_factory=lambda: torch.zeros(()))

    def add(self, rows: Float[Tensor, "rows d_in"], dense_rows: Float[Tensor, "rows d_in"]) -> None:
        """Adds the rows of a batch."""
        self.tokens += rows.shape[0]
        self.gram = self.gram + (rows.mT @ rows).double()
        self.cross = self.cross + (rows.mT @ dense_rows).double()


class _InputReachedError(Exception):
    """Ends a forward pass whose remainder is of no interest."""


class SequentialCompression:
    """Compresses the layers of a model in the order in which they are called.

    Costs, for each block, two forward passes of it and of its compressed copy for every input that its layers read,
    over all calibration windows; memory of two blocks, and of the hidden states of both streams.

    Args:
        run: the run.
        inputs: calibration samples.
        work: where finished layers are and go.
        units: what to compress.
        monitor: told of every unit.
    """

    def __init__(
        self,
        run: Run,
        inputs: CalibrationInputs,
        work: WorkFolder,
        units: Sequence[Unit],
        monitor: Monitor,
    ) -> None:
        self._run = run
        self._inputs = inputs
        self._work = work
        self._units = units
        self._monitor = monitor
        self._done = 0

    def complete(self) -> None:
        """Compresses all units.

        Raises:
            IllConditionedGramError: a Gram matrix cannot be factorized.
            CompressionCancelledError: the caller wants the run to end.
        """
        if all(is_finished(self._work, unit) for unit in self._units):
            return
        lists = self._run.architecture.lists
        # Behind the last layer to compress nothing need be run.
        last = max(index for index, names in enumerate(self._run.layers) if self._units_of(names))
        streams = self._begin()
        for position, blocks in enumerate(lists):
            if blocks.first > last:
                break
            if position:
                streams = self._begin((lists[position - 1], streams))
            for index in range(blocks.first, min(blocks.stop, last + 1)):
                self._pass_block(index, streams, onwards=index < last)

    def _begin(self, passed: tuple[BlockList, _Streams] | None = None) -> _Streams:
        """Both streams at the first block of a list: of the model's first one, or of the one behind that given."""
        run = self._run
        if passed is None:
            dense = begin_walk(run, split_inputs(run, self._inputs, TOKENS_PER_BATCH))
            return dense, Activations(
                hidden=list(dense.hidden), calls=dense.calls, first=dense.first, beside=dense.beside
            )
        blocks, before = passed
        dense, compressed = (
            begin_walk(run, split_inputs(run, self._inputs, TOKENS_PER_BATCH), passed=(blocks, stream))
            for stream in before
        )
        return dense, compressed

    def _pass_block(self, index: int, streams: _Streams, *, onwards: bool) -> None:
        with loaded_block(self._run, index) as block:
            twin = copy.deepcopy(block)
            self._compress_block(index, (block, twin), streams)
            for batch in range(len(streams[0].hidden) if onwards else 0):
                self._monitor.pulse()
                streams[0].step(block, index, batch)
                streams[1].step(twin, index, batch)
        del twin
        return_freed_memory()

    def _units_of(self, names: Sequence[str]) -> list[Unit]:
        return [unit for unit in self._units if unit.names[0] in names]

    def _compress_block(self, index: int, blocks: tuple[nn.Module, nn.Module], streams: _Streams) -> None:
        run = self._run
        names = run.layers[index]
        units = self._units_of(names)
        if not units:
            return
        prefix = f"{run.architecture.block_name(index)}."
        dense = {name: blocks[0].get_submodule(name.removeprefix(prefix)) for name in names}
        twins = {name: blocks[1].get_submodule(name.removeprefix(prefix)) for name in names}
        shapes = {name: run.architecture.shape(name) for name in names}
        groups = find_input_groups(dense, shapes, lambda: streams[0].run(blocks[0], index, 0))
        for group in groups:
            pending = [unit for unit in units if unit.names[0] in group.members]
            if not all(is_finished(self._work, unit) for unit in pending):
                sums = self._sums(group, index, blocks, streams, (dense, twins))
                for unit in pending:
                    self._compress_unit(unit, dense, sums)
            elif pending:
                self._monitor.skip_to((self._done + len(pending)) / len(self._units))
            self._done += len(pending)
            for unit in pending:
                for name in unit.names:
                    self._install(name, twins[name], unit)

    def _sums(
        self,
        group: InputGroup,
        index: int,
        blocks: tuple[nn.Module, nn.Module],
        streams: _Streams,
        layers: tuple[dict[str, nn.Module], dict[str, nn.Module]],
    ) -> _CrossSums:
        """Sums over what the group's layers read in both streams."""
        sums = _CrossSums()
        name = group.members[0]
        called_once = False
        for batch in range(len(streams[0].hidden)):
            self._monitor.pulse()
            rows = [
                _inputs_of(layer[name], functools.partial(stream.run, block, index, batch), stop_at_first=called_once)
                for layer, block, stream in zip(layers, blocks, streams, strict=True)
            ]
            called_once = len(rows[0]) == 1
            for dense_rows, compressed_rows in zip(*rows, strict=True):
                sums.add(compressed_rows.to(self._run.precision), dense_rows.to(self._run.precision))
        return sums

    def _compress_unit(self, unit: Unit, dense: dict[str, nn.Module], sums: _CrossSums) -> None:
        if is_finished(self._work, unit):
            return
        self._monitor.step(self._done / len(self._units), unit.names[0])
        run = self._run
        weight = torch.cat([oriented_weight(dense[name]) for name in unit.names], dim=1).double()
        target = cross_target(weight, sums.gram, sums.cross, tokens=sums.tokens, shrinkage=run.config.shrinkage)
        statistics = GramStatistics(
            tokens=sums.tokens, gram=sums.gram, output_gram=None, input_energy=sums.gram.diagonal()
        )
        with naming_the_layer(unit.names[0]):
            problem = layer_problem(run, self._work, unit.names, statistics, weight=target)
            result = compress_unit(run.method, problem, unit)
        energies = torch.cat([self._work.output_energies(name) for name in unit.names]).to(run.device)
        save(run, self._work, unit, result.factors, _achieved(problem, weight, result.factors, sums, energies))

    def _install(self, name: str, twin: nn.Module, unit: Unit) -> None:
        """Gives a layer of the compressed copy the weight that is stored for it."""
        factors = self._work.factors(name)
        assert factors is not None, name
        own = {part: entry.read() for part, entry in factors.items()}
        atoms = own.get("weight_u")
        candidate = unit.candidates[unit.names.index(name)]
        if atoms is None and candidate.rank is not None:
            shared = self._work.factors(unit.names[0])
            assert shared is not None, name
            atoms = shared["weight_u"].read()
        d_in, d_out = self._run.architecture.shape(name)
        coefficients = unpack_coefficients(
            own["weight"], own.get("weight_mask"), candidate.rank or d_in, d_out, layer=name
        )
        weight = compose_weight(None if atoms is None else atoms.T, coefficients, self._run.dtype)
        oriented_weight(twin).copy_(weight.T)


def cross_target(
    weight: Float[Tensor, "d_in d_out"],
    gram: Float[Tensor, "d_in d_in"],
    cross: Float[Tensor, "d_in d_in"],
    *,
    tokens: int,
    shrinkage: float,
) -> Float[Tensor, "d_in d_out"]:
    """The weight that brings the inputs of the compressed model closest to the dense model's outputs.

    Minimises ‖XW - X'W*‖² + a·Σ_i G'_ii ‖w_i - w*_i‖² with G' = X'ᵀX' and a the strength of the shrinkage: where the
    tokens are too few to tell, the target stays with W.

    Args:
        weight: W, in float64.
        gram: G'.
        cross: X'ᵀX.
        tokens: rows of X.
        shrinkage: pull towards the diagonal, [0, 1].

    Returns:
        W*, in float64.
    """
    shrunk = shrunk_gram(gram, tokens, shrinkage)
    pull = shrunk.diagonal() - gram.diagonal()
    mean = shrunk.diagonal().mean()
    # Inputs that never fire leave a zero on the diagonal; their weights stay what they are.
    floor = torch.where(shrunk.diagonal() > 0, 1e-10 * mean, torch.where(mean > 0, mean, 1.0))
    solution: Tensor = torch.linalg.solve(shrunk + torch.diag(floor), cross @ weight + (pull + floor)[:, None] * weight)
    return solution


def _achieved(
    problem: LayerProblem,
    weight: Float[Tensor, "d_in d_out"],
    factors: LayerFactors,
    sums: _CrossSums,
    energies: Float[Tensor, " d_out"],
) -> Achieved:
    """‖XW - X'W̃‖² and ‖XW‖² by output: what the layers before have spoilt and this one has not made good counts."""
    stored = factors.coefficients if factors.dictionary is None else factors.dictionary @ factors.coefficients
    stored = stored.double()
    common = (stored * (sums.cross @ weight)).sum(dim=0)
    errors = energies - 2 * common + (stored * (sums.gram @ stored)).sum(dim=0)
    scale = 1.0 if problem.column_weights is None else problem.column_weights.double().square()
    return Achieved(errors=(errors * scale).cpu(), energies=(energies * scale).cpu())


def _inputs_of(layer: nn.Module, run: Callable[[], object], *, stop_at_first: bool) -> list[Float[Tensor, "rows d_in"]]:
    """What a layer reads, call by call, while its block runs; no further than the first call if that is known to do."""
    rows: list[Tensor] = []

    def note(_module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        tensor = first_input(args, kwargs).detach()
        rows.append(tensor.reshape(-1, tensor.shape[-1]))
        if stop_at_first:
            raise _InputReachedError

    handle = layer.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with suppress(_InputReachedError):
            run()
    finally:
        handle.remove()
    return rows
