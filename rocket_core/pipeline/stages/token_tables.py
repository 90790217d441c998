"""Profiling and compression of the token embedding and the head, which are quantized or stay dense.

A table W̃ with a row for every token errs in two places. As a head, its error at output j is weighted by the Fisher
diagonal f_j of the logits, like that of any linear layer. As an embedding, the error of row j is added to the hidden
states where token j is read, and weighted by the Fisher diagonal e of the embedding's output, times the square of what
the embedding multiplies its rows by. A token that is read often is also predicted often, so that its share of the text
is estimated by its share of the logits' Fisher diagonal, f_j / Σf. The errors of a tied table then add up to those of a
linear layer with the Gram matrix G + N diag(e) / Σf, where G is that of the head's input over N tokens. An embedding by
itself has the Gram matrix N diag(e), and all its rows count equally. So has one that is tied to the head of a masked
language model, whose losses are changes of its last hidden states.

Encoder and decoder often look up the same table. Each of these embeddings has its own e, over the tokens of the output,
and e is their sum: a token is taken to be as frequent in what the encoder reads as in what the decoder predicts.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from rocket_core.calibration.samples import CalibrationInputs
from rocket_core.candidates import Candidate, LayerProfile
from rocket_core.layers.scaled_embedding import embedding_scale
from rocket_core.linalg.whitening import GramStatistics
from rocket_core.methods import LayerProblem, output_weights, quantized
from rocket_core.methods.sampled_outputs import SampledOutputs
from rocket_core.models.block_calls import run_before
from rocket_core.models.token_tables import TokenTable
from rocket_core.pipeline.block_walk import BlockWalk, loaded_surroundings, split_inputs
from rocket_core.pipeline.context import Run
from rocket_core.pipeline.layer_inputs import load_weight, naming_the_layer
from rocket_core.pipeline.layer_prior import prior_weights, table_share, uncalibrated_statistics
from rocket_core.pipeline.progress import Monitor
from rocket_core.pipeline.stages.compress import AchievedErrors, is_finished, output_energies, save
from rocket_core.pipeline.stages.units import CompressionUnit
from rocket_core.pipeline.state.work_folder import WorkFolder
from rocket_core.system.process_memory import return_freed_memory

NEVER_CALLED = "never called through forward"


def profile_table(
    run: Run, walk: BlockWalk, work: WorkFolder, table: TokenTable, inputs: CalibrationInputs
) -> LayerProfile | None:
    """Profile a table and store its profile and statistics; return None if the model uses it in another way.

    Args:
        run: the run.
        walk: the walk through the dense model, which is taken to its end if the table is a head.
        work: work folder with the sensitivities, to which the profile is written.
        table: the table.
        inputs: calibration samples.

    Raises:
        NonFiniteCalibrationError: the inputs of the head contain NaN or infinity.
        IllConditionedGramError: their Gram matrix cannot be factorized.
    """
    statistics = _statistics(run, walk, work, table, inputs)
    if statistics is None:
        return None
    problem = _problem(run, work, table, statistics)
    with naming_the_layer(table.name):
        candidates = quantized.profile_choices(problem, SampledOutputs.of(problem), run.config.code_choices)
    if statistics.gram is not None:
        work.save_gram(table.name, statistics.gram.to(run.precision), quota=run.config.statistics_quota_bytes)
    d_in, d_out = problem.shape
    dense = Candidate(
        kind="dense",
        kept_parameters=d_in * d_out,
        stored_bytes=run.stored_bytes(table.name),
        reconstruction_error=0.0,
        weight_error=0.0,
        loss=problem.predicted_loss_increase(0.0),
    )
    profile = LayerProfile(
        name=table.name,
        d_in=d_in,
        d_out=d_out,
        input_group=table.name,
        tokens=statistics.tokens,
        candidates=(dense, *candidates),
    )
    work.save_profile(profile)
    return profile


def compress_tables(
    run: Run, inputs: CalibrationInputs, work: WorkFolder, units: Sequence[CompressionUnit], monitor: Monitor
) -> list[CompressionUnit]:
    """Quantize the tables that the allocation does not leave dense, for the inputs of the dense model.

    Args:
        run: the run.
        inputs: calibration samples, needed if statistics were not stored.
        work: work folder with the statistics, to which codes are written.
        units: the units to compress.
        monitor: notified of every table.

    Returns:
        The other units, which are those of blocks.

    Raises:
        CompressionCancelledError: the caller has cancelled the run.
    """
    tables = {table.name: table for table in run.tables}
    walk = BlockWalk(run, inputs, monitor.pulse, work.sensitivity)
    for unit in units:
        table = tables.get(unit.names[0])
        if table is None or is_finished(work, unit):
            continue
        monitor.step(0.0, table.name)
        statistics = _stored_statistics(run, work, table.name) or _statistics(run, walk, work, table, inputs)
        assert statistics is not None, "a table without statistics has no profile"
        problem = _problem(run, work, table, statistics)
        with naming_the_layer(table.name):
            result = run.method.compress(problem, unit.candidates[0])
        achieved = AchievedErrors(errors=result.errors.cpu(), energies=output_energies(problem))
        save(run, work, unit, result.factors, achieved)
        del problem
        return_freed_memory()
    return [unit for unit in units if unit.names[0] not in tables]


def _stored_statistics(run: Run, work: WorkFolder, name: str) -> GramStatistics | None:
    profile, gram = work.profile(name), work.gram(name)
    if profile is None or gram is None:
        return None
    return _of_gram(gram.to(run.device), profile.tokens)


def _statistics(
    run: Run, walk: BlockWalk, work: WorkFolder, table: TokenTable, inputs: CalibrationInputs
) -> GramStatistics | None:
    """Return the Gram matrix of all uses of a table; None if the model does not use it in a known way."""
    if not run.config.calibrates:
        return uncalibrated_statistics([table.name])[table.name]
    tokens = inputs.positions(run.positions)
    looked_up = None if table.embedding is None else _lookup_weights(run, work, table, inputs)
    if table.embedding is not None and looked_up is None:
        return None
    if table.measured_head is None:
        assert looked_up is not None
        return _of_gram(tokens * torch.diag(looked_up), tokens)
    multiplied = walk.head_statistics(table.measured_head)
    if multiplied is None or multiplied.gram is None:
        return None
    if looked_up is None:
        return multiplied
    gram = multiplied.gram
    if run.config.measures_sensitivities:
        share = looked_up / _head_weights(run, work, table).square().sum()
    else:
        share = looked_up * gram.diagonal().mean() / multiplied.tokens
    return _of_gram(gram + multiplied.tokens * torch.diag(share), multiplied.tokens)


def _lookup_weights(
    run: Run, work: WorkFolder, table: TokenTable, inputs: CalibrationInputs
) -> Float[Tensor, " hidden"] | None:
    """Return the Fisher diagonal of an embedding's rows, or ones; None if the model does not look them up."""
    assert table.embedding is not None
    if run.config.measures_sensitivities:
        weights = [_lookup_weights_of(run, work, name) for name in table.embeddings]
        found = sum(weight for weight in weights if weight is not None)
        return found if isinstance(found, Tensor) else None
    if len(run.architecture.language_lists) > 1:
        return torch.ones(run.architecture.outputs(table.embedding), dtype=torch.float64, device=run.device)
    return (
        torch.ones(run.architecture.outputs(table.embedding), dtype=torch.float64, device=run.device)
        if (_is_looked_up(run, table.embedding, inputs))
        else None
    )


def _lookup_weights_of(run: Run, work: WorkFolder, embedding: str) -> Float[Tensor, " hidden"] | None:
    sensitivity = work.sensitivity(embedding)
    assert sensitivity is not None, embedding
    found = sensitivity.fisher_diagonal.to(run.device)
    if not bool(found.any()):
        return None
    scale = embedding_scale(run.architecture.model.get_submodule(embedding))
    assert scale is not None, "the architecture lists no table that computes more"
    return scale**2 * output_weights(found, per_output=run.config.column_weights).square()


def _is_looked_up(run: Run, embedding: str, inputs: CalibrationInputs) -> bool:
    """Return whether the model calls its embedding before its blocks."""
    called = []
    first = run.architecture.language_lists[0]
    with loaded_surroundings(run, first, head=False) as model, torch.no_grad():
        handle = model.get_submodule(embedding).register_forward_hook(lambda *_: called.append(True))
        try:
            run_before(model, run.architecture.blocks_of(first), next(split_inputs(run, inputs[:1])))
        finally:
            handle.remove()
    return bool(called)


def _head_weights(run: Run, work: WorkFolder, table: TokenTable) -> Float[Tensor, " tokens"]:
    assert table.measured_head is not None
    sensitivity = work.sensitivity(table.measured_head)
    assert sensitivity is not None, table.measured_head
    return output_weights(sensitivity.fisher_diagonal, per_output=run.config.column_weights).to(run.device)


def _problem(run: Run, work: WorkFolder, table: TokenTable, statistics: GramStatistics) -> LayerProblem:
    weight = load_weight(run, table.name)
    weights = None if run.config.calibrates else prior_weights(weight, table_share(table))
    if run.config.measures_sensitivities:
        if table.measured_head is None:
            weights = torch.full((weight.shape[1],), weight.shape[1] ** -0.5, dtype=torch.float64, device=run.device)
        else:
            weights = _head_weights(run, work, table)
    return LayerProblem(
        weight=weight,
        statistics=statistics,
        shrinkage=run.config.shrinkage,
        precision=run.precision,
        output_weights=weights,
    )


def _of_gram(gram: Float[Tensor, "d d"], tokens: int) -> GramStatistics:
    return GramStatistics(tokens=tokens, gram=gram, output_gram=None, input_energy=gram.diagonal())
