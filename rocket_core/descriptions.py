"""What docstrings say of a model's attributes, in its JSON schema, so that it is written once."""

from typing import Any

from docstring_parser import DocstringStyle, parse
from pydantic import BaseModel


def described(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """Gives every property the description of its attribute; for `json_schema_extra` of a model's configuration.

    Args:
        schema: the model's schema, changed in place.
        model: the model; its docstring has an `Attributes` section.
    """
    docstring = parse(model.__doc__ or "", style=DocstringStyle.GOOGLE)
    properties = schema.get("properties", {})
    for attribute in docstring.params:
        if attribute.arg_name in properties and attribute.description:
            properties[attribute.arg_name].setdefault("description", " ".join(attribute.description.split()))
    if docstring.description:
        schema["description"] = docstring.description
