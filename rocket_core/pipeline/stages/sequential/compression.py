"""Sequential compression: each layer is compressed for the inputs that the compressed layers before it produce.

Two streams of hidden states pass through the model: that of the dense model, and that of the model as compressed so
far. A layer whose inputs are X in the first and X' in the second is compressed towards the dense output: the weight
that brings X' closest to XW is W* = (X'ᵀX')⁻¹X'ᵀX W. The method is given a weight between W and W*, at most halfway,
with the Gram matrix of X'. Later layers thus compensate for errors of earlier ones, as far as possible, instead of
accumulating them. In a decoder, a layer whose output is added to the residual stream also compensates for what the
stream lacks, see `InputSums`. Where text is read in both directions, less is compensated, see `WholeTextSums`.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rocket_core.calibration.samples import CalibrationInputs
from rocket_core.calibration.token_weights import SEQUENTIAL_POWER, TokenWeights
from rocket_core.layers import approximation
from rocket_core.linalg.whitening import GramStatistics
from rocket_core.methods import CompressedWeight, LayerProblem
from rocket_core.models.architecture import oriented_weight
from rocket_core.models.block_calls import Activations
from rocket_core.models.block_lists import BlockList
from rocket_core.pipeline.block_walk import begin_walk, differentiated_tokens, loaded_block, split_inputs
from rocket_core.pipeline.context import Run, in_float32
from rocket_core.pipeline.layer_inputs import layer_problem, naming_the_layer
from rocket_core.pipeline.progress import Monitor
from rocket_core.pipeline.stages.compress import (
    AchievedErrors,
    compress_unit,
    is_finished,
    save,
    with_rounded_values,
)
from rocket_core.pipeline.stages.sequential.block_side import BlockSide
from rocket_core.pipeline.stages.sequential.cross_sums import CrossSums, WholeTextSums
from rocket_core.pipeline.stages.sequential.expert_sums import ExpertLayer, ExpertSums, expert_layers
from rocket_core.pipeline.stages.sequential.input_sums import InputSums
from rocket_core.pipeline.stages.sequential.refine import (
    REFINED_BATCHES,
    REFINED_TOKENS_ON_CPU,
    CompressedBlock,
    Refinement,
)
from rocket_core.pipeline.stages.stored_weight import install_weight
from rocket_core.pipeline.stages.units import CodedSizes, CompressionUnit
from rocket_core.pipeline.state.work_folder import WorkFolder

# Cost of refining a block, in units of that of compressing its layers; only the progress bar depends on it.
_REFINEMENT_COST = 2.0

_Streams = tuple[Activations, Activations]


class SequentialCompression:
    """Compression of a model's layers in the order in which they are called.

    For each block, the cost is a forward pass of it and of its compressed copy up to every input that its layers read,
    over all calibration windows; the part before its last attention is run at most twice. Memory is that of two blocks,
    and three times the hidden states of both streams.

    Args:
        run: the run.
        inputs: calibration samples.
        work: work folder for finished layers.
        units: the units to compress.
        sizes: bytes of entropy-coded layers.
        monitor: notified of every unit.
    """

    def __init__(
        self,
        run: Run,
        inputs: CalibrationInputs,
        work: WorkFolder,
        units: Sequence[CompressionUnit],
        sizes: CodedSizes,
        monitor: Monitor,
    ) -> None:
        # Rounding would hide how the streams differ.
        self._run = run = in_float32(run)
        self._inputs = inputs
        self._work = work
        self._units = units
        self._sizes = sizes
        self._monitor = monitor
        self._refinement = Refinement(run, work, self._batches) if run.config.refine else None
        self._done = 0
        self._refined = 0.0

    def complete(self) -> None:
        """Compress all units.

        Raises:
            IllConditionedGramError: a Gram matrix cannot be factorized.
            CompressionCancelledError: the caller has cancelled the run.
        """
        compressed = [index for index, names in enumerate(self._run.layers) if self._units_in(names)]
        refined = self._refinement is None or all(self._refinement.is_finished(index) for index in compressed)
        if refined and all(is_finished(self._work, unit) for unit in self._units):
            return
        lists = self._run.architecture.lists
        # Nothing after the last layer to compress needs to be run.
        last = max(compressed)
        streams = self._begin(lists[0])
        for position, blocks in enumerate(lists):
            if blocks.first > last:
                break
            if position:
                before = lists[position - 1]
                streams = self._begin(blocks) if before.in_tower else self._begin(blocks, (before, streams))
            for index in range(blocks.first, min(blocks.stop, last + 1)):
                self._pass_block(index, streams, onwards=index < last)

    def _begin(self, blocks: BlockList, passed: tuple[BlockList, _Streams] | None = None) -> _Streams:
        """Return both streams at the first block of a list, or of the list after the given one."""
        run = self._run
        if passed is not None:
            dense, compressed = (
                begin_walk(run, self._batches(), blocks, passed=(passed[0], stream)) for stream in passed[1]
            )
            return dense, compressed
        dense = begin_walk(run, self._batches(), blocks)
        if not any(run.layers[: blocks.first]):
            return dense, replace(dense, hidden=list(dense.hidden))
        return dense, begin_walk(run, self._batches(), blocks, on_loaded=self._install_tower)

    def _install_tower(self, model: nn.Module) -> None:
        """Replace the weights of the tower, whose blocks come first, with those of its compressed layers."""
        run = self._run
        for index in range(run.architecture.language_lists[0].first):
            units = self._units_in(run.layers[index])
            for unit in units:
                for name in unit.names:
                    install_weight(run, self._work, unit, name, model.get_submodule(name))
            if self._refinement is not None and units:
                module = model.get_submodule(run.architecture.block_name(index))
                self._refinement.apply(CompressedBlock(index=index, module=module, dense=module, units=units))

    def _batches(self) -> Iterator[dict[str, torch.Tensor]]:
        if not self._run.config.refine:
            return split_inputs(self._run, self._inputs)
        positions = REFINED_TOKENS_ON_CPU if self._run.device.type == "cpu" else None
        return split_inputs(self._run, self._inputs, positions, least_batches=REFINED_BATCHES)

    def _pass_block(self, index: int, streams: _Streams, *, onwards: bool) -> None:
        run = self._run
        names = run.layers[index]
        prefix = f"{run.architecture.block_name(index)}."
        with loaded_block(run, index) as block:
            sides = tuple(
                BlockSide(
                    module, index, states, {name: module.get_submodule(name.removeprefix(prefix)) for name in names}
                )
                for module, states in zip((block, copy.deepcopy(block)), streams, strict=True)
            )
            dense, compressed = sides
            units = self._units_in(names)
            refines = self._refinement is not None and bool(units)
            passed = self._compress_block(index, units, dense, compressed, onwards=onwards or refines)
            for batch in range(dense.batches if (onwards or refines) and not passed else 0):
                self._monitor.pulse()
                dense.step(batch)
            if refines:
                self._refine_block(index, units, dense, compressed)
            for batch in range(dense.batches if onwards else 0):
                self._monitor.pulse()
                compressed.step(batch)

    def _units_in(self, names: Sequence[str]) -> list[CompressionUnit]:
        return [unit for unit in self._units if unit.names[0] in names]

    def _share(self, more: int = 0) -> float:
        """Return the completed part of the work, once some more units are compressed."""
        weight = 0.0 if self._refinement is None else _REFINEMENT_COST
        return (self._done + more + weight * self._refined) / ((1 + weight) * len(self._units))

    def _refine_block(
        self, index: int, units: Sequence[CompressionUnit], dense: BlockSide, compressed: BlockSide
    ) -> None:
        """Refine a block that is compressed; the dense stream has passed it."""
        assert self._refinement is not None
        block = CompressedBlock(index=index, module=compressed.block, dense=dense.block, units=units)
        finished = self._refinement.is_finished(index)
        before = self._refined

        def note(part: float) -> None:
            self._refined = before + part * len(units)
            self._monitor.step(self._share(), units[0].names[0])

        self._sizes.note_refined(self._refinement.refine(block, compressed.states, dense.states, note))
        self._refined = before + len(units)
        if finished:
            self._monitor.skip_to(self._share())
        compressed.forget()

    def _compress_block(
        self, index: int, units: Sequence[CompressionUnit], dense: BlockSide, compressed: BlockSide, *, onwards: bool
    ) -> bool:
        """Compress the units of a block; return whether the dense stream has reached the next block in the process."""
        if not units:
            return False
        record = self._work.block(index)
        assert record is not None, index
        experts = expert_layers(self._run.layers[index], dense.block, f"{self._run.architecture.block_name(index)}.")
        groups = _in_order([(group, experts.get(group[0])) for group in record.groups if self._units_in(group)])
        of_experts = self._expert_sums([layer for _, layer in groups if layer is not None], dense, compressed)
        of_inputs = self._input_sums(index, dense, compressed)
        measured = differentiated_tokens(self._run, self._inputs, dense.states)
        weights = TokenWeights(self._work.sensitivity, dense.states.hidden, measured, power=SEQUENTIAL_POWER)
        passed = False
        for position, (group, layer) in enumerate(groups):
            found = self._units_in(group)
            if not all(is_finished(self._work, unit) for unit in found):
                if layer is None:
                    passed = onwards and position == len(groups) - 1
                    empty = self._no_sums(index, found, dense, weights.of(group))
                    sums = of_inputs.add_to(empty, group[0], alone=len(group) == 1, for_good=passed)
                else:
                    sums = of_experts.of(layer)
                for unit in found:
                    self._compress_unit(unit, dense.layers, sums)
            else:
                self._monitor.skip_to(self._share(len(found)))
            self._done += len(found)
            for unit in found:
                for name in unit.names:
                    install_weight(self._run, self._work, unit, name, compressed.layers[name])
        return passed

    def _expert_sums(self, layers: Sequence[ExpertLayer], dense: BlockSide, compressed: BlockSide) -> ExpertSums:
        return ExpertSums(
            layers,
            dense,
            compressed,
            dtype=self._run.precision,
            everywhere=self._run.config.calibrate_all_experts,
            on_batch=self._monitor.pulse,
        )

    def _input_sums(self, index: int, dense: BlockSide, compressed: BlockSide) -> InputSums:
        architecture = self._run.architecture
        return InputSums(
            dense,
            compressed,
            dtype=self._run.precision,
            on_batch=self._monitor.pulse,
            compensates=architecture.is_causal and not architecture.list_of(index).in_tower,
        )

    def _no_sums(
        self, index: int, units: Sequence[CompressionUnit], dense: BlockSide, weights: Tensor | None
    ) -> CrossSums:
        """Return empty sums for the units of a block that read the same input, given the weights of tokens."""
        architecture = self._run.architecture
        in_both_directions = not architecture.is_causal and architecture.list_of(index).first == 0
        if architecture.kind != "text" or not in_both_directions:
            return CrossSums(weights=weights)
        names = [name for unit in units for name in unit.names]
        profile = self._work.profile(names[0])
        assert profile is not None, names[0]
        energy = sum(float(self._work.output_energies(name).sum()) for name in names)
        weight = torch.cat([oriented_weight(dense.layers[name]) for name in names], dim=1)
        return WholeTextSums(weight=weight.to(self._run.precision), mean_energy=energy / profile.tokens)

    def _compress_unit(self, unit: CompressionUnit, dense: Mapping[str, nn.Module], sums: CrossSums) -> None:
        if is_finished(self._work, unit):
            return
        self._monitor.step(self._share(), unit.names[0])
        run = self._run
        weight = torch.cat([oriented_weight(dense[name]) for name in unit.names], dim=1).double()
        target = sums.target(weight, run.config.shrinkage)
        gram = sums.fitted_gram
        statistics = GramStatistics(tokens=sums.tokens, gram=gram, output_gram=None, input_energy=gram.diagonal())
        with naming_the_layer(unit.names[0]):
            problem = layer_problem(run, self._work, unit.names, statistics, weight=target)
            result = compress_unit(run.method, problem, self._sizes.sized(unit))
            result = with_rounded_values(run, unit, problem, result)
        save(run, self._work, unit, result.factors, _achieved(problem, weight, result.factors, sums))


def _in_order(
    groups: Sequence[tuple[Sequence[str], ExpertLayer | None]],
) -> list[tuple[Sequence[str], ExpertLayer | None]]:
    """Return groups of layers in the order of their compression: the last layers of all experts after the others."""
    return sorted(groups, key=lambda group: group[1] is not None and group[1].is_last)


def _achieved(
    problem: LayerProblem,
    weight: Float[Tensor, "d_in d_out"],
    factors: CompressedWeight,
    sums: CrossSums,
) -> AchievedErrors:
    """Return ‖XW - X'W̃‖² and ‖XW‖² by output.

    The error includes uncompensated errors of earlier layers, and what is added to compensate for those in the stream.
    """
    stored = approximation(factors, torch.float64)
    energies = (weight * (sums.dense_gram @ weight)).sum(dim=0)
    common = (stored * (sums.cross @ weight)).sum(dim=0)
    errors = energies - 2 * common + (stored * (sums.gram @ stored)).sum(dim=0)
    scale = 1.0 if problem.output_weights is None else problem.output_weights.double().square()
    return AchievedErrors(errors=(errors * scale).cpu(), energies=(energies * scale).cpu())
