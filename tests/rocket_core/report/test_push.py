import pytest
from pydantic import ValidationError

from rocket_core.report.push import PushReport

VALID = {"repository": "a/b", "url": "https://hub/a/b", "commit": "c0ffee", "is_new": True} | {
    "export": "dense",
    "files": 1,
    "size": 2,
}


def test_a_valid_report_survives_json():
    report = PushReport.model_validate(VALID)
    assert PushReport.model_validate_json(report.model_dump_json()) == report


@pytest.mark.parametrize(
    "changes", [{"url": "javascript:alert(1)"}, {"url": "https://a b"}, {"url": ""}, {"commit": "x"}, {"commit": ""}]
)
def test_what_cannot_be_linked_to_is_refused(changes):
    with pytest.raises(ValidationError, match="is not"):
        PushReport.model_validate(VALID | changes)
