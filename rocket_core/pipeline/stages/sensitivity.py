"""Measurement of sensitivities: one pass forward through the blocks, and one back in reverse order."""

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rocket_core.calibration.experts import with_another_token
from rocket_core.calibration.samples import CalibrationInputs
from rocket_core.calibration.sensitivity import (
    Loss,
    Sensitivity,
    SquaredGradients,
    gradient_of_encoder,
    natural_loss,
    output_gradient,
    side_inputs,
)
from rocket_core.calibration.token_loss import TextLoss, read_tokens
from rocket_core.experts import UnfusedExperts, is_expert_name
from rocket_core.models.block_calls import Activations, added_by_model, handing_on, run_before
from rocket_core.models.block_lists import BlockList
from rocket_core.pipeline.block_walk import begin_walk, loaded_block, loaded_surroundings, split_inputs
from rocket_core.pipeline.context import Run
from rocket_core.pipeline.progress import Monitor
from rocket_core.pipeline.state.gradient_tensors import Gradients, batch_key, gradient_tensors, read_gradients
from rocket_core.pipeline.state.tensor_cache import StateCache, StateKind
from rocket_core.pipeline.state.work_folder import WorkFolder
from rocket_core.report.calibrated_text import CalibratedText
from rocket_core.system.process_memory import return_freed_memory

# A backward pass holds about thirty numbers per token and hidden unit; for this many tokens they take less memory than
# the weights of a large block.
TOKENS_PER_GRADIENT_BATCH = 2048

_CACHE_NAME = "sensitivity-states"
# Cost of a block's backward pass in units of its forward pass: another forward, and a backward of twice that.
_BACKWARD_COST = 3


def measure_sensitivities(
    run: Run,
    calibration: CalibrationInputs,
    work: WorkFolder,
    monitor: Monitor,
    *,
    windows: int = 32,
) -> dict[str, Sensitivity]:
    """Measure the Fisher diagonal of the output of each layer to compress.

    For output coordinate j of a layer it is `f_j = E_tokens[g_j^2]`, g the gradient of a window's summed loss. Each
    layer's vector is on disk as soon as it is known, and a stopped run continues at its block, with an identical result
    (on the CPU, with the same number of threads). A forward and a backward pass, with a second forward of each block,
    hold one block and the hidden states; `(blocks + 2) * windows * tokens * hidden size` numbers are on disk.

    Args:
        run: the run.
        calibration: calibration samples.
        work: work folder for finished vectors.
        monitor: notified of every block and batch.
        windows: number of samples to use, from the first; >= 1.

    Returns:
        Sensitivities of all layers by name, in model order, then of the modules of token tables; all zero for a layer
        that is never called.

    Raises:
        NonFiniteCalibrationError: the gradients of a layer contain NaN or infinity.
        UnsupportedArchitectureError: a block has no backward pass.
        CompressionCancelledError: the caller has cancelled the run.
    """
    names = [name for block in run.layers for name in block]
    names += [name for table in run.tables for name in table.measured_modules]
    cache = StateCache(work.path / _CACHE_NAME)
    if any(work.sensitivity(name) is None for name in names):
        in_order = run.architecture.is_causal or len(run.architecture.lists) > 1
        loss = natural_loss(run.architecture.model, reads_in_order=in_order)
        _ReversePass(run, calibration[:windows], work, cache, monitor, loss).complete()
    cache.remove()
    found = {name: work.sensitivity(name) for name in names}
    return {name: sensitivity for name, sensitivity in found.items() if sensitivity is not None}


class _ReversePass:
    """One pass over a model's blocks, forward and back.

    The position of the pass is determined by what is on disk: hidden states at more and more places on the way forward;
    then gradients, each at a place after which all layers are known, and hidden states at fewer and fewer. Places are
    counted through all lists of blocks: one before each block, and one after the last of each list.
    """

    def __init__(
        self,
        run: Run,
        calibration: CalibrationInputs,
        work: WorkFolder,
        cache: StateCache,
        monitor: Monitor,
        loss: Loss,
    ) -> None:
        self._run = run
        self._batches = list(split_inputs(run, calibration, TOKENS_PER_GRADIENT_BATCH))
        self._work = work
        self._cache = cache
        self._monitor = monitor
        self._loss: Loss = loss
        self._weighs_tokens = run.config.weighs_tokens and loss == "tokens"
        self._lists = run.architecture.language_lists
        self._heads = [table.measured_head for table in run.tables if table.measured_head is not None]
        self._embeddings = embeddings_by_list(run)
        self._tower = [name for names in run.layers[: self._lists[0].first] for name in names]
        # Nothing before the first compressed block is needed, unless the embedding or the tower is compressed.
        first = next(index for index, names in enumerate(run.layers) if names)
        self._first = self._lists[0].first if any(self._embeddings) or self._tower else first
        self._blocks = len(run.layers)
        modules = run.architecture.model.named_modules()
        self._experts = [name for name, module in modules if isinstance(module, UnfusedExperts)]

    def complete(self) -> None:
        """Complete the pass, continuing from where an earlier run stopped."""
        reached = self._cache.indices("gradients")
        if reached:
            self._monitor.skip_to(self._share(reached[0] - self._list_at(reached[0])))
        else:
            self._go_forward()
        place = self._cache.indices("gradients")[0]
        for number, blocks in reversed(list(enumerate(self._lists))):
            if blocks.first + number <= place and self._first < blocks.stop:
                self._go_back(number, place - number)
                place = blocks.first + number - 1
        if self._embeddings[0] or self._tower:
            self._reach_start()

    def _go_forward(self) -> None:
        kept = self._cache.indices("hidden")
        begin = kept[-1] if kept else self._lists[0].first
        for number, blocks in enumerate(self._lists):
            end = blocks.stop + number
            if begin < end or number + 1 == len(self._lists):
                place = blocks.first + number
                passed = self._passed(number)
                states = begin_walk(self._run, self._batches, blocks, passed=passed)
                if begin > place or (begin == place and kept):
                    self._restore(states, begin)
                    self._monitor.skip_to((begin - number) / self._total)
                elif self._is_needed(place):
                    self._save_hidden(states, place)
                self._pass_list(number, max(begin - number, blocks.first), states)
                if number + 1 == len(self._lists):
                    self._turn_round(states, passed, end)
                states.hidden.clear()
                return_freed_memory()

    def _pass_list(self, number: int, begin: int, states: Activations) -> None:
        for index in range(begin, self._lists[number].stop):
            self._monitor.step(index / self._total)
            with loaded_block(self._run, index) as block:
                for batch in range(len(states.hidden)):
                    self._monitor.pulse()
                    states.step(block, index, batch)
            if self._is_needed(index + 1 + number):
                self._save_hidden(states, index + 1 + number)

    def _is_needed(self, place: int) -> bool:
        """Return whether the way back reads the hidden states at a place."""
        number = self._list_at(place)
        return place - number >= self._first or place == self._lists[number].stop + number

    def _list_at(self, place: int) -> int:
        """Return the number of the list that contains a place."""
        return next(number for number, blocks in enumerate(self._lists) if place <= blocks.stop + number)

    def _save_hidden(self, states: Activations, place: int) -> None:
        extra_count = torch.tensor(-1 if states.extra_count is None else states.extra_count)
        self._cache.save("hidden", place, {"extra_count": extra_count, **_by_batch(states.hidden)})

    def _restore(self, states: Activations, place: int) -> None:
        entries = self._cache.entries("hidden", place)
        extra_count = int(entries["extra_count"].read())
        states.extra_count = None if extra_count < 0 else extra_count
        states.hidden[:] = [
            entries[batch_key(batch)].read().to(self._run.device) for batch in range(len(self._batches))
        ]

    def _passed(self, number: int, *, recorded: bool = False) -> tuple[BlockList, Activations] | None:
        """Return the list before the given one, with its output; None for the first.

        Args:
            number: number of the list.
            recorded: whether the computation from that output is to be differentiated.
        """
        if number == 0:
            return None
        before = self._lists[number - 1]
        states = Activations(hidden=[], calls=[], first=before.first)
        self._restore(states, before.stop + number - 1)
        for hidden in states.hidden:
            hidden.requires_grad_(recorded)
        return before, states

    def _turn_round(self, states: Activations, passed: tuple[BlockList, Activations] | None, place: int) -> None:
        """Compute the gradient of the loss with respect to the output of the last block."""
        self._monitor.step(self._blocks / self._total)
        architecture = self._run.architecture
        blocks = architecture.blocks_of(self._lists[-1])
        before = None if passed is None else (architecture.blocks_of(passed[0]), passed[1])
        gradients = []
        text = TextLoss()
        squares = self._squares(self._heads) if self._heads else None
        with loaded_surroundings(self._run, self._lists[-1], head=True) as model:
            for number, batch in enumerate(self._batches):
                self._monitor.pulse()
                gradients.append(
                    output_gradient(
                        model,
                        blocks,
                        self._loss,
                        batch,
                        states,
                        number=number,
                        passed=before,
                        watched=squares,
                        text=text,
                        drawn=self._weighs_tokens,
                    )
                )
        tokens = self._tokens(states)
        if squares is not None:
            self._save_sensitivities(self._heads, squares, tokens)
        if text.tokens:
            self._work.save_text(
                CalibratedText(
                    tokens=text.tokens,
                    negative_log_likelihood=text.negative_log_likelihood / text.tokens,
                    entropy=text.entropy / text.tokens,
                )
            )
        # Saved last, as the pass continues from the gradients.
        self._save_gradients(Gradients(hidden=gradients), place, tokens=tokens)
        self._cache.drop("hidden", place)

    def _tokens(self, states: Activations) -> int:
        """Return the number of positions at which the model's last blocks compute."""
        read = [read_tokens(batch) for batch in self._batches]
        return sum(
            hidden.shape[0] * hidden.shape[1] if tokens is None else tokens.numel()
            for tokens, hidden in zip(read, states.hidden, strict=True)
        )

    def _go_back(self, number: int, end: int) -> None:
        """Propagate gradients from the input of block `end` to that of its list, and to the list before if needed."""
        blocks = self._lists[number]
        on = self._first < blocks.first
        passed = self._passed(number, recorded=on)
        states = begin_walk(self._run, self._batches, blocks, passed=passed)
        handed = [side_inputs(calls) for calls in states.calls]
        # Set if the first block's input depends on the encoder's output as well.
        direct = [hidden if hidden.requires_grad else None for hidden in states.hidden]
        states.hidden.clear()
        return_freed_memory()
        gradients, tokens = self._gradients(end + number, handed)
        for index in reversed(range(max(blocks.first, self._first), end)):
            self._monitor.step(self._share(index + 1), next(iter(self._run.layers[index]), None))
            self._pull_back(states, index, gradients, handed, tokens)
            # Saved before the gradients that it was computed from are removed, so that one of them always exists.
            self._save_gradients(gradients, index + number, tokens=tokens)
            self._cache.drop("gradients", index + 1 + number)
            self._cache.drop("hidden", index + number)
        if number and self._embeddings[number]:
            self._reach_embeddings(number, gradients, tokens)
        if on and passed is not None:
            found = []
            for batch, output in enumerate(passed[1].hidden):
                reached, of_reached = list(handed[batch]), list(gradients.sides[batch])
                whole = direct[batch]
                if whole is not None:
                    reached.append(whole)
                    of_reached.append(gradients.hidden[batch])
                found.append(gradient_of_encoder(output, reached, of_reached, batch=batch))
            place = blocks.first + number
            self._save_gradients(Gradients(hidden=found), place - 1, tokens=tokens)
            self._cache.drop("gradients", place)
            self._cache.drop("hidden", place - 1)

    def _pull_back(
        self, states: Activations, index: int, gradients: Gradients, handed: Sequence[Sequence[Tensor]], tokens: int
    ) -> None:
        """Propagate the gradients, in place, from the output of a block to its input, and save those of its layers."""
        number = self._lists.index(self._run.architecture.list_of(index))
        inputs = self._cache.entries("hidden", index + number)
        names = self._run.layers[index]
        squares = self._squares(names)
        if self._tower and any(added[index - states.first] is not None for added in states.added):
            # What the model adds to the output of the block, which the tower may have computed.
            self._save_gradients(Gradients(hidden=gradients.hidden), index, tokens=tokens, of="added")
        with loaded_block(self._run, index) as block, squares.watching():
            for batch, gradient in enumerate(gradients.hidden):
                self._monitor.pulse()
                hidden = inputs[batch_key(batch)].read().to(self._run.device)
                call = states.calls[batch][index - states.first]
                gradients.hidden[batch], of_sides = squares.pull_back(
                    block, call, hidden, gradient, batch=batch, sides=handed[batch]
                )
                totals = gradients.sides[batch]
                gradients.sides[batch] = [total.added(new) for total, new in zip(totals, of_sides, strict=True)]
        self._save_sensitivities(names, squares, tokens)

    def _reach_embeddings(self, number: int, gradients: Gradients, tokens: int) -> None:
        """Propagate the gradients from the input of a decoder's first block to its token embedding."""
        blocks, passed = self._lists[number], self._passed(number, recorded=True)
        assert passed is not None
        squares = self._squares(self._embeddings[number])
        encoder, modules = (self._run.architecture.blocks_of(found) for found in (passed[0], blocks))
        with loaded_surroundings(self._run, blocks, head=False) as model:
            for index, batch in enumerate(self._batches):
                self._monitor.pulse()
                with handing_on((encoder, passed[1]), index):
                    before = functools.partial(self._before, model, modules, batch, [])
                    squares.pull_to_start(before, [gradients.hidden[index]], batch=index)
        self._save_sensitivities(self._embeddings[number], squares, tokens)

    def _reach_start(self) -> None:
        """Propagate the gradients from the input of the first block to the token embedding and the tower."""
        run, first = self._run, self._lists[0]
        blocks = run.architecture.blocks_of(first)
        gradients, tokens = self._gradients(first.first, [()] * len(self._batches))
        added = {index: self._gradients(index, [], of="added")[0] for index in self._cache.indices("added")}
        squares = self._squares([*self._tower, *self._embeddings[0]])
        with loaded_surroundings(run, first, head=False) as model:
            for number, batch in enumerate(self._batches):
                self._monitor.pulse()
                before = functools.partial(self._before, model, blocks, batch, [*added])
                reached = [gradients.hidden[number], *(found.hidden[number] for found in added.values())]
                squares.pull_to_start(before, reached, batch=number)
        self._save_sensitivities([*self._tower, *self._embeddings[0]], squares, tokens)

    def _before(
        self, model: PreTrainedModel, blocks: nn.ModuleList, batch: Mapping[str, Tensor], added: Sequence[int]
    ) -> list[Tensor]:
        """Return the input of the first block, and what the model adds to the outputs of some blocks."""
        if not added:
            return [run_before(model, blocks, batch)]
        first = self._lists[0].first
        inputs = added_by_model(model, blocks, batch)
        return [inputs[0], *(inputs[index - first + 1] for index in added)]

    def _save_sensitivities(self, names: Sequence[str], squares: SquaredGradients, tokens: int) -> None:
        diagonals = {name: squares.total(name) / tokens for name in names}
        for name, diagonal in with_another_token(diagonals, self._experts, tokens).items():
            # In other batches an expert may get other tokens, as its router decides close calls otherwise.
            by_token = None if is_expert_name(name, self._experts) else squares.token_gradients(name)
            self._work.save_sensitivity(name, Sensitivity(fisher_diagonal=diagonal, token_gradients=by_token))

    def _squares(self, names: Sequence[str]) -> SquaredGradients:
        architecture = self._run.architecture
        layers: dict[str, nn.Module] = {name: architecture.model.get_submodule(name) for name in names}
        widths = {name: architecture.outputs(name) for name in names}
        return SquaredGradients(layers=layers, widths=widths, keeps_tokens=self._weighs_tokens)

    def _save_gradients(self, gradients: Gradients, place: int, *, tokens: int, of: StateKind = "gradients") -> None:
        self._cache.save(of, place, gradient_tensors(gradients, tokens))

    def _gradients(
        self, place: int, handed: Sequence[Sequence[Tensor]], *, of: StateKind = "gradients"
    ) -> tuple[Gradients, int]:
        """Return the gradients stored at a place, and the number of tokens."""
        entries = self._cache.entries(of, place)
        return read_gradients(entries, len(self._batches), handed, self._run.device), int(entries["tokens"].read())

    @property
    def _total(self) -> int:
        """Cost of the whole pass, in forward passes of a block."""
        return self._blocks + 1 + _BACKWARD_COST * (self._blocks - self._first)

    def _share(self, position: int) -> float:
        """Return the completed share of the pass when the gradients are at the input of block `position`."""
        return (self._blocks + 1 + _BACKWARD_COST * (self._blocks - position)) / self._total


def embeddings_by_list(run: Run) -> list[list[str]]:
    """Return for each list of blocks the token embeddings to quantize whose rows it reads.

    An embedding next to the decoder's blocks belongs to these; all others to the first list.
    """
    lists = run.architecture.language_lists
    found: list[list[str]] = [[] for _ in lists]
    for name in (name for table in run.tables for name in table.embeddings):
        parents = (blocks.name.rpartition(".")[0] for blocks in lists[1:])
        later = (number for number, parent in enumerate(parents, 1) if parent and name.startswith(f"{parent}."))
        found[next(later, 0)].append(name)
    return found


def _by_batch(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return {batch_key(batch): tensor for batch, tensor in enumerate(tensors)}
