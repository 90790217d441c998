"""Memory that a benchmark needs, from a model's sizes. Loads no torch."""

from rocket_core.inspection.footprint import ModelShape, ResourceEstimate

# Libraries in a process that runs a model: 0.3 GiB were measured on a CPU.
_RUNTIME = 512 * 2**20


def benchmark_footprint(model: ModelShape, exports: int) -> ResourceEstimate:
    """Estimate the memory for running the original and its artifacts at the same time, each in its own process.

    Layers that are packed in memory take less than the dense ones that are counted.

    Args:
        model: the model's sizes.
        exports: number of artifacts.
    """
    each = model.stored_bytes * 3 // 2 + _RUNTIME
    return ResourceEstimate(memory_bytes=(1 + exports) * each, disk_bytes=0)
