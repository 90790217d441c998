"""`/docs`: the API, from the application's own OpenAPI document."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from markupsafe import Markup, escape

from app.api.paths import DOCS
from app.api.problems import PROBLEM_TYPE
from app.api.schema_text import Json, meaning, type_text
from app.pages.rendering import render

router = APIRouter(include_in_schema=False)

_METHODS = ("get", "post", "put", "delete")
_JSON = "application/json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A parameter of an operation, or a member of a schema.

    Attributes:
        name: its name.
        place: `path`, `query` or `header`; "" for a member.
        kind: its type.
        meaning: its description.
        is_required: whether it must be sent.
    """

    name: str
    place: str
    kind: Markup
    meaning: str
    is_required: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A response of an operation.

    Attributes:
        status: HTTP status.
        content: what it contains.
        note: when it is sent.
        is_refusal: whether it is a problem document.
    """

    status: str
    content: Markup
    note: str
    is_refusal: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """An operation of the API.

    Attributes:
        id: anchor on the page.
        method: HTTP method, in capitals.
        path: path, with its parameters in braces.
        summary: first sentence of the description.
        details: the rest of the description.
        parameters: parameters in path, query and headers.
        body: what is sent, or "".
        answers: the responses.
    """

    id: str
    method: str
    path: str
    summary: str
    details: str
    parameters: tuple[Member, ...]
    body: Markup
    answers: tuple[Answer, ...]


@router.get(DOCS)
def show_api(request: Request) -> Response:
    """Show every operation and every schema."""
    document = request.app.openapi()
    groups: dict[str, list[Operation]] = {}
    for path, item in document["paths"].items():
        for method in (each for each in _METHODS if each in item):
            group = item[method].get("tags", ["service"])[0]
            groups.setdefault(group, []).append(_operation(method, path, item[method]))
    schemas = document["components"]["schemas"]
    return render(
        request,
        "api_browser.html.j2",
        groups=groups,
        schemas={name: (schema.get("description", ""), _members(schema)) for name, schema in sorted(schemas.items())},
        base=str(request.base_url).rstrip("/"),
    )


def _operation(method: str, path: str, operation: Json) -> Operation:
    first, _, rest = operation.get("description", "").partition("\n\n")
    return Operation(
        id=f"{method}{path}".replace("/", "-").replace("{", "").replace("}", ""),
        method=method.upper(),
        path=path,
        summary=first,
        details=rest,
        parameters=tuple(
            Member(
                name=each["name"],
                place=each["in"],
                kind=_kind(each.get("schema", {})),
                meaning=each.get("description", each.get("schema", {}).get("description", "")),
                is_required=bool(each.get("required")),
            )
            for each in operation.get("parameters", ())
        ),
        body=_contents(operation.get("requestBody", {}).get("content", {})),
        answers=tuple(_answers(operation["responses"])),
    )


def _answers(responses: Json) -> Iterator[Answer]:
    for status, response in sorted(responses.items()):
        content = response.get("content", {})
        if status != "default":
            is_refusal = PROBLEM_TYPE in content
            described = response.get("description", "")
            yield Answer(
                status=status,
                content=_link("Problem") if is_refusal else _contents(content),
                note="" if described == "Successful Response" else described,
                is_refusal=is_refusal,
            )


def _contents(content: Json) -> Markup:
    kinds: list[Any] = [
        _kind(part.get("schema", {})) if media == _JSON else _quote(media) for media, part in content.items()
    ]
    return Markup(" or ").join(kinds)


def _members(schema: Json) -> tuple[Member, ...]:
    required = schema.get("required", ())
    return tuple(
        Member(name=name, place="", kind=_kind(part), meaning=meaning(part), is_required=name in required)
        for name, part in schema.get("properties", {}).items()
    )


def _kind(schema: Json) -> Markup:
    # All text around links and literals is of this project; both are escaped.
    return Markup(type_text(schema, _link, _quote))  # noqa: S704


def _link(name: str) -> Markup:
    return Markup('<a href="#schema-{0}">{0}</a>').format(name)


def _quote(value: str) -> Markup:
    return Markup("<code>{}</code>").format(escape(value))
