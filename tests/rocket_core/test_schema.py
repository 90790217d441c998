import pytest
from pydantic import ValidationError

from rocket_core.schema import FrozenModel


class Point(FrozenModel):
    """A point."""

    x: float
    """distance to the right, described in
    two lines.
    """


class NamedPoint(Point):
    name: str = ""
    """what it is called."""


def test_a_model_cannot_be_changed():
    point = Point(x=1)
    with pytest.raises(ValidationError, match="frozen"):
        point.x = 2


@pytest.mark.parametrize("values", [{"x": 1, "y": 2}, {"x": float("inf")}, {"x": float("nan")}, {}])
def test_other_members_and_infinities_are_refused(values):
    with pytest.raises(ValidationError):
        Point.model_validate(values)


def test_field_docstrings_also_describe_subclasses():
    schema = NamedPoint.model_json_schema()
    assert schema["properties"]["x"]["description"] == "distance to the right, described in\ntwo lines."
    assert schema["properties"]["name"]["description"] == "what it is called."
    assert "description" not in schema
