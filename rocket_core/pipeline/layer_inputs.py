"""Inputs of a compression method, assembled from the model and the work folder."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from rocket_core.errors import CorruptCheckpointError, IllConditionedGramError
from rocket_core.linalg.prepared_gram import PreparedGram
from rocket_core.linalg.whitening import Eigenbasis, GramStatistics
from rocket_core.methods import LayerProblem, Member, output_weights
from rocket_core.methods.held_out import loss_factor
from rocket_core.pipeline.context import Run
from rocket_core.pipeline.layer_prior import layer_share, prior_weights
from rocket_core.pipeline.state.work_folder import WorkFolder


def layer_problem(
    run: Run,
    work: WorkFolder,
    names: Sequence[str],
    statistics: GramStatistics,
    *,
    weight: Float[Tensor, "d_in d_out"] | None = None,
    basis: Eigenbasis | None = None,
    prepared: PreparedGram | None = None,
    members: Sequence[Member] = (),
) -> LayerProblem:
    """Return the problem of one layer, or of several layers that read the same input, with their weights concatenated.

    Args:
        run: the run.
        work: work folder with the sensitivities.
        names: the layers.
        statistics: statistics of their input.
        weight: W; None loads it.
        basis: its eigenbasis, if known.
        prepared: the Gram matrix of the input with what is derived from it, if another layer has needed it.
        members: what is known of each of several layers.

    Raises:
        CorruptCheckpointError: a weight has NaN or infinite entries.
    """
    weights = [load_weight(run, name) for name in names] if weight is None else [weight]
    if run.config.calibrates:
        importance = _output_weights(run, work, names)
    else:
        importance = torch.cat(
            [prior_weights(own, layer_share(run, name)) for own, name in zip(weights, names, strict=True)]
        )
    return LayerProblem(
        weight=weights[0] if len(weights) == 1 else torch.cat(weights, dim=1),
        statistics=statistics,
        shrinkage=run.config.shrinkage,
        precision=run.precision,
        output_weights=importance,
        output_widths=tuple(run.architecture.shape(name)[1] for name in names),
        basis=None if basis is None else _on_device(basis, run.device),
        prepared=prepared,
        members=tuple(members),
    )


def profiled_problem(
    run: Run, work: WorkFolder, name: str, statistics: GramStatistics, *, prepared: PreparedGram | None = None
) -> LayerProblem:
    """Return the problem of a layer, see `layer_problem`, that predicts losses from held-out tokens."""
    problem = layer_problem(run, work, (name,), statistics, prepared=prepared)
    inputs, known = statistics.held_out, work.sensitivity(name)
    gradients = None if known is None else known.token_gradients
    if inputs is not None and statistics.gram is not None and gradients is not None:
        # Fewer if little was differentiated.
        inputs = inputs[-len(gradients) :]
        problem.loss_factors = (loss_factor(problem, inputs, gradients[-len(inputs) :].to(inputs)),)
    return problem


def load_weight(run: Run, name: str) -> Float[Tensor, "d_in d_out"]:
    """Return the dense weight of a layer."""
    entry = run.loader.entry(f"{name}.weight")
    assert entry is not None, "layers that are stored with others are skipped"
    stored = entry.read()
    # Takes a twentieth of the time of `isfinite` of all entries, and on the CPU no accelerator is waited for.
    if not bool(torch.isfinite(torch.stack(torch.aminmax(stored))).all()):
        raise CorruptCheckpointError(
            f"the weight of layer {name} has NaN or infinite entries; fetch the checkpoint again, or ignore the layer"
        )
    stored = stored.to(run.device, run.compute_dtype)
    return stored if type(run.architecture.model.get_submodule(name)) is Conv1D else stored.mT


@contextmanager
def naming_the_layer(name: str) -> Iterator[None]:
    """Add the name of the layer to errors about matrices that cannot be factorized."""
    try:
        yield
    except (IllConditionedGramError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]  # exported
        raise IllConditionedGramError(f"layer {name}: {error}") from error


def _output_weights(run: Run, work: WorkFolder, names: Sequence[str]) -> Float[Tensor, " d_out"] | None:
    if not run.config.measures_sensitivities:
        return None
    parts = []
    for name in names:
        sensitivity = work.sensitivity(name)
        assert sensitivity is not None, name
        parts.append(output_weights(sensitivity.fisher_diagonal, per_output=run.config.column_weights))
    return torch.cat(parts).to(run.device)


def _on_device(basis: Eigenbasis, device: torch.device) -> Eigenbasis:
    return Eigenbasis(directions=basis.directions.to(device), singular_values=basis.singular_values.to(device))
