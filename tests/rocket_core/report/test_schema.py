"""Reports that other versions have written."""

from rocket_core.config import CompressionConfig
from rocket_core.report.schema import CompressionReport
from tests.reference.reports import report_of_layers


def test_the_earlier_name_of_an_export_is_read():
    report = report_of_layers()
    written = report.model_dump(mode="json")
    written["exports"][0] |= {"kind": "factored", "folder": "factored"}
    written["settings"]["export"] = ["factored"]
    assert CompressionReport.model_validate(written) == report
    assert CompressionConfig(ratio=0.3, export=("factored", "dense")).export == ("rocket", "dense")
