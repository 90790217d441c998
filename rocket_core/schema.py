"""Property descriptions in JSON schemas, taken from the models' docstrings."""

from typing import Any

from docstring_parser import DocstringStyle, parse
from pydantic import BaseModel


def described(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """Add the docstring's description of each attribute to its property; for use as `json_schema_extra`.

    Args:
        schema: the model's schema, changed in place.
        model: the model; its docstring, or that of a model it extends, has an `Attributes` section.
    """
    properties = schema.get("properties", {})
    docstrings = [parse(kind.__doc__ or "", style=DocstringStyle.GOOGLE) for kind in model.__mro__]
    for attribute in (attribute for docstring in docstrings for attribute in docstring.params):
        if attribute.arg_name in properties and attribute.description:
            properties[attribute.arg_name].setdefault("description", " ".join(attribute.description.split()))
    if docstrings[0].description:
        schema["description"] = docstrings[0].description
