"""The figures of a report, and those of several compressions of one model. Loads no torch."""

from collections.abc import Iterable, Mapping, Sequence

from rocket_core.candidates import CODE_KINDS, SizePoint
from rocket_core.config import Objective, stage_label
from rocket_core.report.figure import Cells, Figure, columns_of, known_names, rows_of
from rocket_core.report.healing import HealingPoint
from rocket_core.report.layer_groups import summarize_layers
from rocket_core.report.layer_maps import allocation_map, expert_map
from rocket_core.report.quality import EvaluationReport
from rocket_core.report.schema import CompressionReport, LayerReport, StageReport
from rocket_core.schema import FrozenModel
from rocket_core.sizes.budget import kept_fraction

ERROR_NAMES: Mapping[Objective, str] = {
    "fisher": "predicted increase of the loss, nats per token",
    "prior": "mean squared error of the weights, relative to them, by how much layers of each kind usually matter",
    "whitened": "sum of the squared relative errors of all outputs",
    "weight": "sum of the relative errors of all weights",
}
"""Meaning of a total error; for models that do not predict tokens, `fisher` is the change of the output."""

# A page with more rows takes long to load, and its cells could not be seen.
_MOST_EXPERTS = 2**13
_KEPT_MEASURES: Mapping[str, str] = {
    "kept_fraction": "the fraction of its parameters that is left",
    "bits_per_weight": "its bits per weight on disk",
}


class MeasuredModel(FrozenModel):
    """A compression of a model, measured next to its original."""

    name: str
    """how people tell it from the others."""
    address: str
    """page about it."""
    stored_bytes: int
    """bytes of its weights."""
    evaluation: EvaluationReport
    """the measurement."""
    is_marked: bool = False
    """whether the figure is about this one in particular."""

    @property
    def text(self) -> str:
        """What was read; measurements of different texts cannot be compared."""
        return f"{self.evaluation.dataset}, {self.evaluation.tokens:,} tokens, {self.evaluation.text_sha256[:6]}"

    @property
    def perplexity_ratio(self) -> float | None:
        """Perplexity divided by the original's; None if either is unknown."""
        before, after = self.evaluation.before.perplexity, self.evaluation.after.perplexity
        return None if before is None or after is None else after / before


def report_figures(report: CompressionReport) -> tuple[Figure, ...]:
    """Return all figures of a report; layers of large mixtures are summarised."""
    experts, layers = expert_map(report.layers), summarize_layers(report.layers)
    return (
        allocation_map(layers),
        *(() if experts is None or len(experts.rows) > _MOST_EXPERTS else (experts,)),
        errors_by_size(layers),
        predicted_and_achieved(layers),
        stage_times(report),
    )


def errors_by_size(layers: Sequence[LayerReport]) -> Figure:
    """Return the error of each layer's output by its fraction of parameters or its bits per weight."""
    by = _kept_measure(layers)
    table: Mapping[str, Cells[LayerReport]] = {
        "layer": Cells("layer", lambda layer: layer.name, "text"),
        "kind": Cells("stored as", lambda layer: layer.kind, "text"),
        "kept_parameters": Cells("kept parameters", lambda layer: layer.kept_parameters, "count"),
        "kept_fraction": Cells("kept", _kept_fraction, "fraction"),
        "bits_per_weight": Cells("bits on disk per weight", lambda layer: layer.bits_per_weight),
        "error": Cells("error of the output", lambda layer: layer.achieved_error),
    }
    return Figure(
        name="errors-by-size",
        title="Error by what was kept",
        note="Each point is a layer: the relative error of its output on the calibration data, by "
        f"{_KEPT_MEASURES[by]}. A layer far above the others loses most at its size.",
        columns=columns_of(table),
        rows=rows_of(table, (layer for layer in layers if layer.achieved_error is not None)),
        options={"by": by},
    )


def predicted_and_achieved(layers: Iterable[LayerReport]) -> Figure:
    """Return the error predicted by the profile and the achieved one, for each layer that is not dense."""
    table: Mapping[str, Cells[LayerReport]] = {
        "layer": Cells("layer", lambda layer: layer.name, "text"),
        "kind": Cells("stored as", lambda layer: layer.kind, "text"),
        "predicted": Cells("predicted error", lambda layer: layer.reconstruction_error),
        "achieved": Cells("achieved error", lambda layer: layer.achieved_error),
    }
    compressed = (layer for layer in layers if layer.achieved_error is not None and layer.kind != "dense")
    return Figure(
        name="predicted-and-achieved",
        title="Predicted and achieved",
        note="Each point is a compressed layer: the error of its output that the profile predicted, and that of what "
        "was stored. Below the line a layer became better than predicted, above it worse.",
        columns=columns_of(table),
        rows=rows_of(table, compressed),
    )


def stage_times(report: CompressionReport) -> Figure:
    """Return the cost of each stage; columns without any known value are left out."""
    table: Mapping[str, Cells[StageReport]] = {
        "stage": Cells("stage", lambda stage: stage_label(stage.name), "text"),
        "seconds": Cells("wall time", lambda stage: stage.seconds, "seconds"),
        "peak_memory_bytes": Cells("most memory", lambda stage: stage.peak_memory_bytes, "bytes"),
        "peak_device_bytes": Cells("most memory of the accelerator", lambda stage: stage.peak_device_bytes, "bytes"),
        "energy_kwh": Cells("energy", lambda stage: None if stage.energy is None else stage.energy.kwh, "energy"),
        "device": Cells("computed on", lambda stage: stage.device, "text"),
        "kernels": Cells("rounded by", lambda stage: stage.kernels, "text"),
    }
    known = {name: table[name] for name in known_names(table, rows_of(table, report.stages))}
    return Figure(
        name="stage-times",
        title="Cost of each stage",
        note="Wall time, and energy where it is known; of a run that was resumed, all its parts added up.",
        columns=columns_of(known),
        rows=rows_of(known, report.stages),
    )


def loss_curve(points: Iterable[HealingPoint]) -> Figure:
    """Return the divergence from the original by the tokens that healing read.

    Args:
        points: the points so far, in order.
    """
    table: Mapping[str, Cells[HealingPoint]] = {
        "step": Cells("step", lambda point: point.step, "count"),
        "tokens": Cells("tokens read", lambda point: point.tokens, "count"),
        "training": Cells("divergence on the text read", lambda point: point.training),
        "held_out": Cells("divergence on held-out windows", lambda point: point.held_out),
    }
    return Figure(
        name="loss-curve",
        title="Loss curve",
        note="Divergence from the original's predictions, in nats per token, by the tokens read: the line is that of "
        "the text as it was read, the points that of windows which no step reads. The values with the lowest point are "
        "kept.",
        columns=columns_of(table),
        rows=rows_of(table, points),
    )


def size_frontier(
    points: Iterable[SizePoint],
    objective: Objective,
    *,
    other_bytes: int,
    marked_bytes: int | None = None,
    marked_error: float | None = None,
) -> Figure:
    """Return the predicted size and error of a model at every ratio.

    Args:
        points: points by rising ratio.
        objective: the objective that errors measure.
        other_bytes: bytes of the model other than the compressible layers.
        marked_bytes: a size to mark; None marks none.
        marked_error: error of what is marked, not a point if it decides about more than the layers; None
            marks the point of the nearest size.
    """
    table: Mapping[str, Cells[SizePoint]] = {
        "ratio": Cells("ratio removed", lambda point: point.ratio, "fraction"),
        "model_bytes": Cells("size of all weights", lambda point: other_bytes + point.stored_bytes, "bytes"),
        "kept_parameters": Cells("kept parameters", lambda point: point.kept_parameters, "count"),
        "error": Cells("predicted error", lambda point: point.error),
    }
    return Figure(
        name="size-frontier",
        title="Size and predicted error",
        note=f"Each point is the best model of its size; the error is the {ERROR_NAMES[objective]}.",
        columns=columns_of(table),
        rows=rows_of(table, points),
        options={"marked_bytes": marked_bytes, "marked_error": marked_error},
    )


def allocation_difference(jobs: Sequence[tuple[str, Sequence[LayerReport]]]) -> Figure:
    """Return what each layer kept in several compressions: its fraction of parameters, or bits per weight.

    Args:
        jobs: a name and the layers of each; layers that are not in all of them are left out.
    """
    kept = [(job, {layer.name: layer for layer in layers}) for job, layers in jobs]
    common = [name for name in kept[0][1] if all(name in other for _, other in kept)] if kept else []
    by = _kept_measure([layer for _, layers in jobs for layer in layers])
    table: Mapping[str, Cells[tuple[str, LayerReport]]] = {
        "layer": Cells("layer", lambda pair: pair[1].name, "text"),
        "job": Cells("job", lambda pair: pair[0], "text"),
        "kept_fraction": Cells("kept", lambda pair: _kept_fraction(pair[1]), "fraction"),
        "bits_per_weight": Cells("bits on disk per weight", lambda pair: pair[1].bits_per_weight),
    }
    return Figure(
        name="allocation-difference",
        title="What each layer kept",
        note=f"One row for each layer, one mark for each job: {_KEPT_MEASURES[by]}.",
        columns=columns_of(table),
        rows=rows_of(table, ((job, layers[name]) for name in common for job, layers in kept)),
        options={"by": by},
    )


def quality_over_size(model: str, measured: Iterable[MeasuredModel]) -> Figure:
    """Return size and measured quality of compressions of one model.

    Args:
        model: the model.
        measured: the compressions, in any order.
    """
    measures: Mapping[str, Cells[MeasuredModel]] = {
        "kl_divergence": Cells(
            "KL divergence from the original, nats per token", lambda one: one.evaluation.difference.kl_divergence
        ),
        "perplexity_ratio": Cells("perplexity, in proportion to the original's", lambda one: one.perplexity_ratio),
        "cosine_drift": Cells("cosine drift from the original", lambda one: one.evaluation.difference.cosine_drift),
    }
    table: Mapping[str, Cells[MeasuredModel]] = {
        "name": Cells("job", lambda one: one.name, "text"),
        "model_bytes": Cells("size of all weights", lambda one: one.stored_bytes, "bytes"),
        **measures,
        "text": Cells("measured on", lambda one: one.text, "text"),
        "address": Cells("", lambda one: one.address),
        "is_marked": Cells("", lambda one: one.is_marked),
    }
    rows = rows_of(table, sorted(measured, key=lambda one: one.stored_bytes))
    known = known_names(measures, rows)
    return Figure(
        name="quality-over-size",
        title=f"Quality over size: {model}",
        note="Each point is an evaluated job and leads to its page; lower and further left is better. Only points of "
        "the same text, which have the same symbol, can be compared.",
        columns=tuple(column for column in columns_of(table) if column.name not in measures or column.name in known),
        rows=rows,
        measures=known,
    )


def _kept_fraction(layer: LayerReport) -> float:
    return kept_fraction(layer.d_in, layer.d_out, layer.kept_parameters)


def _kept_measure(layers: Sequence[LayerReport]) -> str:
    """Return the column that tells layers apart: those of codes keep all parameters, in fewer bits."""
    is_known = all(layer.bits_per_weight is not None for layer in layers)
    return "bits_per_weight" if is_known and any(layer.kind in CODE_KINDS for layer in layers) else "kept_fraction"
