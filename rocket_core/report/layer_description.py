"""Description of a layer in a report, from its profile and what became of it."""

from rocket_core.candidates import CODE_KINDS, Candidate, FrontierPoint, LayerProfile
from rocket_core.report.schema import LayerOutcome, LayerReport
from rocket_core.sizes.budget import achieved_ratio, bits_per_weight, sparsity


def layer_report(
    profile: LayerProfile, candidate: Candidate, outcome: LayerOutcome | None, frontier: tuple[FrontierPoint, ...] = ()
) -> LayerReport:
    """Describe a layer with its chosen candidate.

    Args:
        profile: profile of the layer.
        candidate: the chosen candidate.
        outcome: result of compressing the layer; None if it stayed dense.
        frontier: the candidates that the knapsack chose from.
    """
    rows = profile.d_in if candidate.rank is None else candidate.rank
    nnz = None if outcome is None or candidate.kind in CODE_KINDS else outcome.nnz
    kept = candidate.kept_parameters if outcome is None else outcome.kept_parameters
    stored = candidate.stored_bytes if outcome is None else outcome.stored_bytes
    # What a report has of the same name; lists of candidates are not among it.
    told = set(LayerReport.model_fields)
    described = profile.model_dump(include=told) | candidate.model_dump(include=told)
    return LayerReport.model_validate(
        described
        | {
            "nnz": nnz,
            "sparsity": None if nnz is None else sparsity(rows, profile.d_out, nnz),
            "rank_nnz_ratio": None if nnz is None or candidate.rank is None else rows * profile.d_out / nnz,
            "kept_parameters": kept,
            "stored_bytes": stored,
            "bits_per_weight": bits_per_weight(profile.d_in, profile.d_out, stored),
            "compression_ratio": achieved_ratio(profile.parameters, kept),
            "achieved_error": 0.0 if outcome is None else outcome.achieved_error,
            "frontier": frontier,
        }
    )
