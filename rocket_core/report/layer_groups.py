"""Summary of a large mixture's layers: the experts of a block together. Loads no torch."""

from collections.abc import Sequence
from itertools import islice
from statistics import fmean

from rocket_core.report.layer_places import general_name
from rocket_core.report.schema import CompressionReport, LayerReport

MOST_LAYERS = 2000
"""Most layers of which a page shows each."""


def summarize_report(report: CompressionReport) -> CompressionReport:
    """Return a report with its layers summarised and without their frontiers."""
    layers = tuple(layer.model_copy(update={"frontier": ()}) for layer in summarize_layers(report.layers))
    skipped = {general_name(name): reason for name, reason in report.skipped.items()}
    return report.model_copy(update={"layers": layers, "skipped": dict(islice(skipped.items(), MOST_LAYERS))})


def summarize_layers(layers: Sequence[LayerReport]) -> tuple[LayerReport, ...]:
    """Return layers as a page shows them, at most `MOST_LAYERS`.

    If there are more, those of a block that are stored alike, and whose names differ in numbers alone, become one:
    sizes and losses are added, and errors are means.

    Args:
        layers: layers of a report, in model order.
    """
    if len(layers) <= MOST_LAYERS:
        return tuple(layers)
    groups: dict[tuple[object, ...], list[LayerReport]] = {}
    for layer in layers:
        form = (layer.kind, layer.d_in, layer.bits, layer.group_size, layer.scale_bits, layer.block_type)
        groups.setdefault((general_name(layer.name), *form), []).append(layer)
    return tuple(map(_together, islice(groups.values(), MOST_LAYERS)))


def _together(layers: Sequence[LayerReport]) -> LayerReport:
    first = layers[0]
    if len(layers) == 1:
        return first
    dense = sum(layer.d_in * layer.d_out for layer in layers)
    kept, stored = sum(layer.kept_parameters for layer in layers), sum(layer.stored_bytes for layer in layers)
    losses = [layer.loss for layer in layers if layer.loss is not None]
    achieved = [layer.achieved_error for layer in layers if layer.achieved_error is not None]
    unlike = dict.fromkeys(("rank", "nnz", "sparsity", "rank_nnz_ratio", "dictionary", "routed_tokens"))
    return first.model_copy(
        update=unlike
        | {
            "name": general_name(first.name),
            "d_out": sum(layer.d_out for layer in layers),
            "kept_parameters": kept,
            "stored_bytes": stored,
            "bits_per_weight": 8 * stored / dense,
            "compression_ratio": max(0.0, 1 - kept / dense),
            "reconstruction_error": fmean(layer.reconstruction_error for layer in layers),
            "weight_error": fmean(layer.weight_error for layer in layers),
            "loss": sum(losses) if len(losses) == len(layers) else None,
            "achieved_error": fmean(achieved) if len(achieved) == len(layers) else None,
        }
    )
