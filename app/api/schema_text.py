"""Types of the OpenAPI document in words, for people who read it."""

from collections.abc import Callable, Mapping
from typing import Any

Json = Mapping[str, Any]

REFERENCE = "#/components/schemas/"
"""Prefix of references to the document's schemas."""

_BOUNDS = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))


def type_text(schema: Json, link: Callable[[str], str], quote: Callable[[str], str]) -> str:
    """Return the type that a schema describes.

    Args:
        schema: the schema.
        link: returns what stands for a named schema.
        quote: returns what stands for a literal value.
    """

    def text(part: Json) -> str:
        return type_text(part, link, quote)

    if "$ref" in schema:
        return link(schema["$ref"].removeprefix(REFERENCE))
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " or ".join(map(text, schema[several]))
    if "allOf" in schema:
        return " and ".join(map(text, schema["allOf"]))
    if "const" in schema:
        return quote(str(schema["const"]))
    if "enum" in schema:
        return ", ".join(quote(str(value)) for value in schema["enum"])
    return _plain_type(schema, text)


def meaning(schema: Json) -> str:
    """Return the description of a member, with its default unless that is said already."""
    described = str(schema.get("description", ""))
    default = schema.get("default")
    if default is None or isinstance(default, dict | list) or "default" in described:
        return described
    return f"{described} Default `{default}`.".strip()


def _plain_type(schema: Json, text: Callable[[Json], str]) -> str:
    kind = schema.get("type", "anything")
    if kind == "array":
        if "prefixItems" in schema:
            return "(" + ", ".join(map(text, schema["prefixItems"])) + ")"
        return f"list of {text(schema.get('items', {}))}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {text(schema['additionalProperties'])}"
    bounds = [f"{sign} {schema[bound]:.12g}" for bound, sign in _BOUNDS if bound in schema]
    form = f" ({schema['format']})" if "format" in schema else ""
    return f"{kind}{form}" + (f", {', '.join(bounds)}" if bounds else "")
