"""The size that a report begins with."""

import pytest

from rocket_core.report.headlines import headlines
from rocket_core.report.schema import ExportReport
from tests.reference.reports import report_of_layers


@pytest.mark.parametrize(
    ("kinds", "expected"), [(("dense",), "as large as the original; the weights are those of"), (("factored",), "was ")]
)
def test_a_dense_export_is_not_said_to_be_smaller(kinds, expected):
    exports = tuple(ExportReport(kind=kind, folder=kind, stored_bytes=1) for kind in kinds)
    size = headlines(report_of_layers().model_copy(update={"exports": exports}))[0]
    assert size.detail.startswith(expected)
