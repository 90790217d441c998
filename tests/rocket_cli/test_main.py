import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer

import rocket_client
from rocket_cli.exit_codes import MEANINGS
from rocket_cli.main import app
from rocket_core import __version__

ROOT = Path(rocket_client.__file__).parents[1]

BASE_INSTALL = """
import sys

class ExtrasAreMissing:
    names = set(sys.argv.pop(1).split(","))

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, ExtrasAreMissing())
from rocket_cli.main import main
main(sys.argv[1:])
"""


def left_out(*extras: str) -> str:
    """Return the modules that extras bring and the base install lacks."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [text for extra in extras for text in project["optional-dependencies"][extra]]
    names = {re.split(r"[\[<>=;]", text)[0] for text in texts} - {project["name"]}
    return ",".join(sorted(name.replace("-", "_") for name in names))


OPTIONAL = left_out("service", "torch", "worker", "mcp")

IMPORTED_BY_HELP = """
import atexit, sys
atexit.register(lambda: sys.stderr.write(" ".join(sys.modules)))
from rocket_cli.main import main
main(["compress", "--help"])
"""


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"COLUMNS": "100", "TERM": "dumb"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment, check=False
    )


@pytest.mark.slow
def test_help_imports_nothing_heavy() -> None:
    process = python(IMPORTED_BY_HELP)

    imported = set(process.stderr.split())
    assert process.returncode == 0
    assert "rocket_cli.commands.compress" in imported
    assert imported.isdisjoint({"torch", "transformers", "datasets", "safetensors", "huggingface_hub", "accelerate"})
    assert imported.isdisjoint({"app", "worker", "httpx2", "sqlalchemy", "fastapi"})


@pytest.mark.parametrize(
    "arguments",
    [
        ("compress", "model", "out", "--ratio", "0.3"),
        ("evaluate", "model", "--text", "text.txt"),
        ("bench", "model"),
        ("serve",),
        ("api",),
        ("worker",),
        ("migrate",),
        ("admin", "keys", "list"),
        ("mcp",),
    ],
    ids=lambda arguments: arguments[0],
)
@pytest.mark.slow
def test_base_install_names_the_missing_packages(arguments: tuple[str, ...]) -> None:
    process = python(BASE_INSTALL, OPTIONAL, *arguments)

    assert process.returncode == 2
    extra = {"compress": "torch", "evaluate": "torch", "bench": "torch", "mcp": "mcp"}.get(arguments[0], "worker")
    assert f"pip install 'rocket-compress[{extra}]'" in process.stderr
    assert "Traceback" not in process.stderr
    assert process.stdout == ""


@pytest.mark.slow
def test_base_install_has_help_and_version() -> None:
    assert python(BASE_INSTALL, OPTIONAL, "--help").returncode == 0
    assert python(BASE_INSTALL, OPTIONAL, "--version").stdout == f"rocket {__version__}\n"
    for command in ("jobs", "submit", "frontier", "download", "push", "compress"):
        assert python(BASE_INSTALL, OPTIONAL, command, "--help").returncode == 0


@pytest.mark.slow
def test_base_install_talks_to_a_server() -> None:
    process = python(BASE_INSTALL, OPTIONAL, "jobs", "--server", "http://127.0.0.1:9")

    assert process.returncode == 75
    assert "127.0.0.1:9" in process.stderr
    assert "Traceback" not in process.stderr


def test_version_is_that_of_the_library(rocket: Callable) -> None:
    outcome = rocket("--version")

    assert (outcome.code, outcome.out) == (0, f"rocket {__version__}\n")


@pytest.mark.parametrize("name", typer.main.get_command(app).commands)
def test_help_names_the_list_of_exit_codes(rocket: Callable, name: str) -> None:
    asked, explained = rocket(name, "--help"), rocket("help", name)

    assert (asked.code, explained.code) == (0, 0)
    assert "`rocket help exit-codes`" in asked.out
    assert explained.out == asked.out


def test_the_list_has_every_exit_code(rocket: Callable) -> None:
    outcome = rocket("help", "exit-codes")

    assert outcome.code == 0
    assert [line.strip().split("  ") for line in outcome.out.splitlines()] == [
        [str(int(code)), meaning] for code, meaning in MEANINGS.items()
    ]


def test_help_without_a_topic_is_that_of_rocket(rocket: Callable) -> None:
    assert rocket("help").out == rocket("--help").out
    assert rocket("help", "compres").code == 2


def test_a_misspelt_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Rockt"):
        rocket_client.Rockt  # noqa: B018


def test_a_misspelt_command_gets_a_suggestion(rocket: Callable) -> None:
    outcome = rocket("compres")

    assert outcome.code == 2
    assert "Did you mean 'compress'?" in outcome.err


def test_a_misspelt_option_gets_a_suggestion(rocket: Callable) -> None:
    outcome = rocket("compress", "model", "out", "--ratoi", "0.3")

    assert outcome.code == 2
    assert "--ratio" in outcome.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("submit", "local/tiny"),
        ("submit", "local/tiny", "--ratio", "much"),
        ("submit", "local/tiny", "--ratio", "0.3", "--hub-token-env", "NONE_OF_THAT_NAME"),
        ("jobs", "--limmit", "3"),
        ("nothing",),
        ("admin", "keys", "create"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_json_for_programs(rocket: Callable, arguments: tuple[str, ...]) -> None:
    outcome = rocket(*arguments, "--json")

    assert outcome.code == 2
    error = json.loads(outcome.out)["error"]
    assert (error["code"], bool(error["message"])) == ("invalid_usage", True)
    assert "Usage" in outcome.err
    assert rocket(*arguments).out == ""


def commands(group: typer.core.TyperGroup, *names: str) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *names, name)
        else:
            yield (*names, name)


@pytest.mark.parametrize("more", [("--heal", "20000"), ("--benchmark",), ("--ratio", "0.3")], ids=" ".join)
def test_an_option_without_its_value_is_named(rocket: Callable, more: tuple[str, ...]) -> None:
    outcome = rocket("compress", "model", "out", "--evaluate", *more)

    assert outcome.code == 2
    said = " ".join(outcome.err.replace("│", " ").split())
    assert f"Option '--evaluate' needs a value, and '{more[0]}' was taken for it." in said
    assert "Invalid value" not in said


def test_every_command_with_a_result_supports_json(rocket: Callable) -> None:
    # These run until they are stopped, or have only text.
    result_less = {("serve",), ("api",), ("worker",), ("mcp",), ("help",)}
    found = set(commands(typer.main.get_command(app)))

    assert result_less < found
    assert not [name for name in found - result_less if "--json" not in rocket(*name, "--help").out]


def test_shell_completion_can_be_installed(rocket: Callable) -> None:
    assert "--install-completion" in rocket("--help").out
