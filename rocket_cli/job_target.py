"""What a job aims at, in a few words."""

from typing import TYPE_CHECKING, assert_never

from rocket_core.report.formatting import bytes_text, percent_text
from rocket_core.sizes.target import MEMBERS, ByBits, ByBytes, ByLoss, ByRatio, target_of

if TYPE_CHECKING:
    from rocket_client.models import Job


def target_text(job: "Job") -> str:
    """Return the target of a compression, or what another job does."""
    if job.push is not None:
        return f"to {job.push.repository}"
    if job.export_to is not None:
        return f"as {job.export_to}"
    return _compression(job) if job.kind == "compression" else job.kind


def _compression(job: "Job") -> str:
    if job.fit is not None:
        return f"in {bytes_text(job.fit.memory_bytes)}"
    match target_of({name: getattr(job, name) for name in MEMBERS}):
        case ByRatio(ratio=ratio):
            return percent_text(ratio)
        case ByBytes(target_bytes=size):
            return f"≤ {bytes_text(size)}"
        case ByBits(bits=bits):
            return f"≤ {bits:.15g} bits"
        case ByLoss(measure=measure, bound=bound):
            return f"KL ≤ {bound:.4g}" if measure == "max_kl" else f"perplexity ≤ +{percent_text(bound)}"
        case None:
            return f"{job.options.get('code_bits')} bits"
        case unknown:
            assert_never(unknown)
