"""Memory and disk that an evaluation needs, from a model's sizes. Loads no torch."""

from rocket_core.inspection.footprint import HEADROOM, ModelShape, ResourceEstimate

# One batch, in the model's dtype and upcast, and the float64 copies of a chunk.
_LOGITS_IN_MEMORY = 768 * 2**20


def evaluation_footprint(model: ModelShape, *, tokens: int, vocabulary: int) -> ResourceEstimate:
    """Estimate the memory and disk for comparing the dense and the compressed model, one after the other.

    Memory is that of one whole model, half as much again for the factors of a compressed one (which are unpacked while
    it runs), and the logits being computed. Disk is that of the dense model's logits.

    Args:
        model: the model's sizes.
        tokens: number of tokens predicted.
        vocabulary: logits per token.
    """
    memory = model.parameters * model.compute_itemsize * 3 // 2 + _LOGITS_IN_MEMORY + HEADROOM
    return ResourceEstimate(memory_bytes=memory, disk_bytes=tokens * vocabulary * model.compute_itemsize)
