"""The numbers that a report begins with."""

import pytest

from rocket_core.report.formatting import bytes_text
from rocket_core.report.headlines import headlines
from rocket_core.report.schema import ExportReport
from tests.reference.reports import report_of_layers
from tests.reference.speed import model_speed, speed_report


@pytest.mark.parametrize(
    ("kinds", "expected"), [(("dense",), "as large as the original; the weights are those of"), (("factored",), "was ")]
)
def test_a_dense_export_is_not_said_to_be_smaller(kinds, expected):
    exports = tuple(ExportReport(kind=kind, folder=kind, stored_bytes=1) for kind in kinds)
    size = headlines(report_of_layers().model_copy(update={"exports": exports}))[0]
    assert size.detail.startswith(expected)


def test_the_memory_of_entropy_coded_layers_is_told():
    report = report_of_layers()
    assert "in memory" not in headlines(report)[0].detail
    layers = tuple(
        layer.model_copy(update={"kind": kind})
        for layer, kind in zip(report.layers, ("dense", "quantized", "entropy_coded", "entropy_coded"), strict=True)
    )
    exports = (ExportReport(kind="rocket", folder="rocket", stored_bytes=10**6),)
    size = headlines(report.model_copy(update={"layers": layers, "exports": exports}))[0]
    weights = sum(layer.d_in * layer.d_out for layer in layers[2:])
    assert size.detail.endswith(f"; about {bytes_text(10**6 + round(1.1 * weights / 8))} in memory on a CPU")
    exports = (ExportReport(kind="gguf", folder="gguf", stored_bytes=10**6),)
    assert "in memory" not in headlines(report.model_copy(update={"layers": layers, "exports": exports}))[0].detail


@pytest.mark.parametrize(
    ("weights", "value", "detail"),
    [
        ((4, 2), "2.00 MB", "of the loaded weights, was 4.00 MB; the process, with cache and buffers, holds 9.00 MB"),
        ((None, None), "9.00 MB", "was 10.00 MB: weights, cache and buffers of the process"),
        ((4, None), "9.00 MB", "was 10.00 MB: weights, cache and buffers of the process"),
    ],
)
def test_memory_is_that_of_the_weights_where_it_is_known(weights, value, detail):
    before, after = (None if each is None else each * 10**6 for each in weights)
    models = (
        model_speed(weights_bytes=before),
        model_speed("rocket", memory_bytes=9_000_000, weights_bytes=after),
    )
    report = report_of_layers().model_copy(update={"speed": speed_report(models=models)})
    memory = next(headline for headline in headlines(report) if headline.name == "Memory")
    assert (memory.value, memory.detail.removesuffix(", was 10.00 MB")) == (value, detail)
