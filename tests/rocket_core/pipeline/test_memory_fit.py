"""A memory with a context as the target of a run: its files, its report, and how it resumes."""

import pytest

from rocket_core.errors import InvalidConfigError
from rocket_core.pipeline import compress
from rocket_core.report.schema import CompressionReport
from rocket_core.sizes.memory_fit import FittedMemory
from tests.rocket_core.pipeline.test_target_size import size_of

CONTEXT = {"context": 32, "batch": 2}


@pytest.fixture
def run(tmp_path, model_folder, settings):
    def make(memory, *, resume=False, **changes):
        target = {"ratio": None, "fit": CONTEXT | {"memory_bytes": memory}} | changes
        config = settings(preset="instant", calibration={}, **target)
        return compress(str(model_folder("llama")), tmp_path / "out", config, resume=resume)

    return make


def test_weights_context_and_engine_fit_into_the_memory(run, model_folder, tmp_path):
    with pytest.raises(InvalidConfigError, match=r"as it is, and 50MB of memory leave .* with 2 times 32 tokens"):
        run(50_000_000)
    with pytest.raises(InvalidConfigError, match="1kB leave nothing for weights"):
        run(1000)
    memory = _memory_for(run, size_of(model_folder("llama")) // 2)
    report = run(memory)
    fit = report.settings.fit
    assert isinstance(fit, FittedMemory)
    written = size_of(tmp_path / "out" / "rocket")
    assert 0.95 * fit.weights_bytes < written <= fit.weights_bytes
    parts = dict(report.memory)
    assert parts["weights"] == written
    assert parts["total"] == written + fit.cache_bytes + fit.engine_bytes <= parts["asked for"] == memory
    assert CompressionReport.model_validate_json((tmp_path / "out" / "report.json").read_bytes()) == report
    assert "Memory when it runs" in (tmp_path / "out" / "rocket" / "report.html").read_text()
    assert f"for {memory:,} bytes of memory with 2 times 32 tokens" in (tmp_path / "out/rocket/README.md").read_text()
    assert run(memory, resume=True) == report
    with pytest.raises(InvalidConfigError, match="already holds the result of another compression"):
        run(memory + 1, resume=True)
    with pytest.raises(InvalidConfigError, match="already holds the result of another compression"):
        run(0, resume=True, fit=None, target_bytes=fit.weights_bytes)


def _memory_for(run, size):
    """Return a memory that leaves about so much for the weights."""
    with pytest.raises(InvalidConfigError) as caught:
        run(50_000_000)
    left = float(str(caught.value).partition("leave ")[2].partition("MB")[0]) * 1e6
    # A twentieth of the memory is left for the engine's runtime.
    return round((size - left) / 0.95 + 50_000_000)
