"""Generated parts of the reference pages."""

import re
from pathlib import Path

import pytest
import typer

from app.shared.settings import describe
from reference_pages import GENERATED, commands, filled_in, openapi, tables
from rocket_cli.exit_codes import MEANINGS
from rocket_cli.main import app

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
SMALL = {
    "paths": {
        "/things/{id}": {
            "get": {
                "tags": ["things"],
                "description": "One thing.",
                "parameters": [
                    {
                        "name": "id",
                        "in": "path",
                        "required": True,
                        "schema": {"type": "string"},
                        "description": "which",
                    },
                    {"name": "n", "in": "query", "schema": {"type": "integer", "minimum": 1, "exclusiveMaximum": 9.5}},
                ],
                "requestBody": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Thing"}}}},
                "responses": {
                    "200": {
                        "description": "Successful Response",
                        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Thing"}}},
                    },
                    "206": {"description": "A part", "content": {"text/plain": {}}},
                    "404": {"description": "Not Found", "content": {"application/problem+json": {"schema": {}}}},
                    "default": {"description": "Failed", "content": {"application/problem+json": {"schema": {}}}},
                },
            }
        }
    },
    "components": {
        "schemas": {
            "Thing": {
                "description": "A thing.",
                "required": ["colour"],
                "properties": {
                    "colour": {"type": "string", "enum": ["red", "green"], "description": "red |\ngreen."},
                    "parts": {
                        "type": "array",
                        "items": {"anyOf": [{"$ref": "#/components/schemas/Thing"}, {"type": "null"}]},
                    },
                    "size": {"type": "number", "description": "how large.", "default": 2},
                    "labels": {"type": "object", "additionalProperties": {"type": "string"}},
                    "at": {"type": "string", "format": "date-time"},
                },
            }
        }
    },
}


def test_an_endpoint_has_parameters_body_and_responses():
    lines = openapi.endpoints(SMALL).splitlines()
    assert lines[:4] == ["## Things", "", "### `GET /things/{id}`", ""]
    assert "| `id` (required) | path | string | which |" in lines
    assert "| `n` | query | integer, ≥ 1, < 9.5 |  |" in lines
    assert "Body: [Thing](#thing)." in lines
    assert "Answers: `200` [Thing](#thing), `206` `text/plain` (A part)." in lines
    assert "Refusals: `404`." in lines


def test_a_schema_has_its_members():
    lines = openapi.schemas(SMALL).splitlines()
    assert lines[:3] == ["### Thing", "", "A thing."]
    assert [line for line in lines if line.startswith("| `")] == [
        "| `colour` (required) | `red`, `green` | red \\| green. |",
        "| `parts` | list of [Thing](#thing) or null |  |",
        "| `size` | number | how large. Default `2`. |",
        "| `labels` | object of string |  |",
        "| `at` | string (date-time) |  |",
    ]


def test_the_http_page_has_every_endpoint_and_schema():
    document = openapi.document()
    written = openapi.endpoints(document)
    for path, item in document["paths"].items():
        for method in item:
            assert f"### `{method.upper()} {path}`\n" in written
    headings = re.findall(r"^### (\w+)$", openapi.schemas(document), flags=re.MULTILINE)
    assert sorted(document["components"]["schemas"]) == headings
    assert {"Problem", "CompressionRequest", "JobOptions"} <= set(headings)
    targets = set(re.findall(r"\]\(#([\w-]+)\)", written))
    assert targets <= {openapi.slug(heading) for heading in headings}


def test_the_command_page_has_every_command_and_no_exit_codes():
    written = commands.command_line()
    for name in typer.main.get_command(app).commands:
        assert f"\n## `rocket {name}`\n" in written
    assert "`--ratio" in written
    assert "lists the exit codes" not in written
    assert "**Commands**" not in written
    assert MEANINGS[min(MEANINGS)] in tables.exit_codes()


def test_tables_have_every_setting_and_every_error():
    for row in describe():
        assert f"| `{row.variable}` |" in tables.settings()
    errors = tables.errors()
    assert "| `infeasible_budget` | No choice of candidates meets the budget. | 422 | 4 |  |" in errors
    assert "| `hub_unavailable` |" in errors
    assert "| `over_quota` |" in errors


def test_table_cells_are_escaped():
    assert tables.table(["a"], [["one | two\nthree"]]).splitlines()[2] == "| one \\| two three |"


def test_markers_are_replaced_and_all_are_used():
    assert filled_in("before\n<!-- generated: exit-codes -->\nafter").startswith("before\n| exit code |")
    with pytest.raises(KeyError):
        filled_in("<!-- generated: nothing -->")
    used = [
        mark
        for page in REFERENCE.glob("*.md")
        for mark in re.findall(r"^<!-- generated: ([a-z-]+) -->$", page.read_text(), flags=re.MULTILINE)
    ]
    assert sorted(used) == sorted(GENERATED)
