"""Conversion of the application's OpenAPI 3.1 document to Markdown."""

import re
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from app.api.problems import Problem
from app.api.schema_text import Json, meaning, type_text
from app.main import create_app
from app.shared.settings import Settings
from reference_pages.tables import table

_METHODS = ("get", "post", "put", "patch", "delete")
_PROBLEM = "application/problem+json"


@cache
def document() -> Json:
    """Return the OpenAPI document of the application, including the schema of the problem document."""
    with tempfile.TemporaryDirectory() as folder:
        made: dict[str, Any] = create_app(Settings(data_dir=Path(folder))).openapi()
    # The document itself repeats this schema at each endpoint.
    made["components"]["schemas"]["Problem"] = Problem.model_json_schema()
    return made


def endpoints(api: Json) -> str:
    """Return every endpoint, in the order and the groups of the document."""
    groups: dict[str, list[str]] = {}
    for path, item in api["paths"].items():
        for method in _METHODS:
            if method in item:
                operation = item[method]
                group = operation.get("tags", ["other"])[0]
                groups.setdefault(group, []).append(_endpoint(method, path, operation))
    return "\n".join("\n".join([f"## {group.capitalize()}\n", *parts]) for group, parts in groups.items())


def schemas(api: Json) -> str:
    """Return every schema with its members, by name."""
    return "\n".join(_schema(name, schema) for name, schema in sorted(api["components"]["schemas"].items()))


def _endpoint(method: str, path: str, operation: Json) -> str:
    parts = [f"### `{method.upper()} {path}`\n", operation.get("description", ""), ""]
    if parameters := operation.get("parameters"):
        parts += [table(("parameter", "in", "type", "meaning"), map(_parameter, parameters))]
    if body := operation.get("requestBody"):
        parts += [f"Body: {_contents(body['content'])}.\n"]
    return "\n".join([*parts, *_answers(operation["responses"])])


def _parameter(parameter: Json) -> tuple[str, str, str, str]:
    name = f"`{parameter['name']}`" + (" (required)" if parameter.get("required") else "")
    schema = parameter.get("schema", {})
    return name, parameter["in"], _type(schema), parameter.get("description", schema.get("description", ""))


def _answers(responses: Json) -> Iterator[str]:
    good, refused = [], []
    for status, response in sorted(responses.items()):
        content = response.get("content", {})
        if _PROBLEM in content:
            if status != "default":
                refused.append(f"`{status}`")
        else:
            described = response.get("description", "")
            note = "" if described == "Successful Response" else f" ({described})"
            good.append(f"`{status}`" + (f" {_contents(content)}" if content else "") + note)
    yield f"Answers: {', '.join(good)}."
    if refused:
        yield f"Refusals: {', '.join(refused)}."
    yield ""


def _contents(content: Json) -> str:
    return " or ".join(_content(media, part.get("schema", {})) for media, part in content.items())


def _content(media: str, schema: Json) -> str:
    return _type(schema) if media == "application/json" else f"`{media}`"


def _schema(name: str, schema: Json) -> str:
    parts = [f"### {name}\n", schema.get("description", ""), ""]
    if "enum" in schema:
        parts += [_type(schema), ""]
    required = schema.get("required", ())
    rows = [
        (_member(member, required), _type(part), meaning(part)) for member, part in schema.get("properties", {}).items()
    ]
    return "\n".join([*parts, table(("member", "type", "meaning"), rows) if rows else ""])


def _member(name: str, required: Sequence[str]) -> str:
    return f"`{name}`" + (" (required)" if name in required else "")


def _type(schema: Json) -> str:
    return type_text(schema, lambda name: f"[{name}](#{slug(name)})", lambda value: f"`{value}`")


def slug(heading: str) -> str:
    """Return the anchor of a heading of one word."""
    return re.sub(r"[^\w-]", "", heading.lower())
