"""The figures of a report, and those of several."""

from collections.abc import Iterable, Mapping, Sequence

from rocket_core.candidates import CODE_KINDS
from rocket_core.report.figures import (
    Column,
    Figure,
    allocation_map,
    expert_map,
    predicted_and_achieved,
    stage_times,
)
from rocket_core.report.layer_groups import summarize_layers
from rocket_core.report.schema import CompressionReport, LayerReport
from rocket_core.sizes.budget import kept_fraction

_KEPT_MEASURES: Mapping[str, str] = {
    "kept_fraction": "the fraction of its parameters that is left",
    "bits_per_weight": "its bits per weight on disk",
}
# A page with more rows takes long to load, and its cells could not be seen.
_MOST_EXPERTS = 2**13


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


def errors_by_size(layers: Iterable[LayerReport]) -> Figure:
    """Return the error of each layer's output by its fraction of parameters or its bits per weight."""
    layers = tuple(layers)
    by = _kept_measure(layers)
    rows = tuple(
        {
            "layer": layer.name,
            "kind": layer.kind,
            "kept_parameters": layer.kept_parameters,
            "kept_fraction": kept_fraction(layer.d_in, layer.d_out, layer.kept_parameters),
            "bits_per_weight": layer.bits_per_weight,
            "error": layer.achieved_error,
        }
        for layer in layers
        if layer.achieved_error is not None
    )
    return Figure(
        name="errors-by-size",
        title="Error by what was kept",
        note="Each point is a layer: the relative error of its output on the calibration data, by "
        f"{_KEPT_MEASURES[by]}. A layer far above the others loses most at its size.",
        columns=(
            Column(name="layer", title="layer", kind="text"),
            Column(name="kind", title="stored as", kind="text"),
            Column(name="kept_parameters", title="kept parameters", kind="count"),
            Column(name="kept_fraction", title="kept", kind="fraction"),
            Column(name="bits_per_weight", title="bits on disk per weight"),
            Column(name="error", title="error of the output"),
        ),
        rows=rows,
        options={"by": by},
    )


def allocation_difference(jobs: Sequence[tuple[str, Sequence[LayerReport]]]) -> Figure:
    """Return what each layer kept in several compressions: its fraction of parameters, or bits per weight.

    Args:
        jobs: a name and the layers of each; layers that are not in all of them are left out.
    """
    kept = [{layer.name: layer for layer in layers} for _, layers in jobs]
    common = [name for name in kept[0] if all(name in other for other in kept)] if kept else []
    by = _kept_measure([layer for _, layers in jobs for layer in layers])
    return Figure(
        name="allocation-difference",
        title="What each layer kept",
        note=f"One row for each layer, one mark for each job: {_KEPT_MEASURES[by]}.",
        columns=(
            Column(name="layer", title="layer", kind="text"),
            Column(name="job", title="job", kind="text"),
            Column(name="kept_fraction", title="kept", kind="fraction"),
            Column(name="bits_per_weight", title="bits on disk per weight"),
        ),
        rows=tuple(
            {
                "layer": name,
                "job": job,
                "kept_fraction": kept_fraction(layer.d_in, layer.d_out, layer.kept_parameters),
                "bits_per_weight": layer.bits_per_weight,
            }
            for name in common
            for (job, _), layer in zip(jobs, [layers[name] for layers in kept], strict=True)
        ),
        options={"by": by},
    )


def _kept_measure(layers: Sequence[LayerReport]) -> str:
    """Return the column that tells layers apart: those of codes keep all parameters, in fewer bits."""
    is_known = all(layer.bits_per_weight is not None for layer in layers)
    return "bits_per_weight" if is_known and any(layer.kind in CODE_KINDS for layer in layers) else "kept_fraction"
