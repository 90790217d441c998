"""Rules of structure that import-linter cannot check."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import networkx
import pytest

import rocket_core

ROOT = Path(rocket_core.__file__).parent.parent
PACKAGES = ("app", "migrations", "rocket_cli", "rocket_client", "rocket_core", "worker")
SOURCES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
WITHOUT_TORCH = (
    "allocation",
    "candidates",
    "config",
    "errors",
    "estimates.estimate",
    "hub.repository",
    "inspection.checks.feasibility",
    "inspection.checks.preconditions",
    "inspection.files.safetensors_headers",
    "sizes.budget",
    "sizes.reachability",
    "report.html",
    "report.schema",
    "sizes.target",
)


BASE_INSTALL = [*(f"rocket_core.{name}" for name in WITHOUT_TORCH), "rocket_cli.main", "app.main", "worker.main"]
BASE_INSTALL += ["worker.attempt.job", "worker.confined.fetch", "rocket_core.checkpoint.download"]


@pytest.mark.parametrize("module", BASE_INSTALL)
@pytest.mark.slow
def test_the_base_install_imports_no_torch(module):
    # In a separate process: import-linter misses what a package's __init__ imports, and this process has torch.
    code = (
        f"import sys, {module}; print([name for name in ('torch', 'transformers', 'datasets') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("module", ["worker.confined.compute", "worker.confined.fetch"])
@pytest.mark.slow
def test_a_process_has_one_thread_until_it_is_confined(module):
    # numpy starts threads when it is imported, which would stay outside.
    code = f"import os, sys, {module}; print('numpy' in sys.modules, len(os.listdir('/proc/self/task')))"
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert result.stdout.strip() == "False 1"


# Lists of fields, and of methods for endpoints, which are not read from top to bottom.
DECLARATIVE = {
    *("client.py", "config.py", "errors.py", "model.py", "models.py", "options.py", "requests.py", "resources.py")
}


@functools.cache
def parsed(file):
    return ast.parse(file.read_text(encoding="utf-8"))


def functions(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_files_and_functions_have_limited_length():
    too_long = []
    for file in SOURCES:
        text = file.read_text(encoding="utf-8")
        if text.count("\n") > 400 and file.name not in DECLARATIVE:
            too_long.append(str(file.relative_to(ROOT)))
        for function in functions(parsed(file)):
            body = function.body
            documented = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
            first = body[1] if documented and len(body) > 1 else body[0]
            if function.end_lineno - first.lineno + 1 > 50:
                too_long.append(f"{file.relative_to(ROOT)}: {function.name}")
    assert too_long == []


def imported_modules(tree):
    """Return all that a module imports, also within functions and for type checkers only."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_modules_import_each_other():
    # A package's __init__ only passes names on.
    modules = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in SOURCES if file.name != "__init__.py"
    }
    graph = networkx.DiGraph(
        (name, other)
        for name, file in modules.items()
        for other in imported_modules(parsed(file))
        if other in modules and other != name
    )
    assert [cycle for cycle in networkx.strongly_connected_components(graph) if len(cycle) > 1] == []


def test_rooms_and_loose_modules_are_few():
    inside = [path for path in (ROOT / "rocket_core").iterdir() if path.name not in {"__init__.py", "py.typed"}]
    assert len([path for path in inside if path.suffix == ".py"]) <= 6
    assert len([path for path in inside if (path / "__init__.py").exists()]) <= 24


def test_no_dict_literal_has_a_duplicate_key():
    # The linter sees names and literals, but not attributes such as the classes of errors.
    duplicates = []
    for file in SOURCES:
        for table in (node for node in ast.walk(parsed(file)) if isinstance(node, ast.Dict)):
            keys = [ast.unparse(key) for key in table.keys if key is not None]
            if len(set(keys)) < len(keys):
                duplicates.append(f"{file.relative_to(ROOT)}:{table.lineno}")
    assert duplicates == []


def test_the_library_mentions_no_cuda():
    # The device is an argument; a hard-coded one breaks every other. Triton's kernels have a fallback for others.
    mentions = []
    for file in sorted({*(ROOT / "rocket_core").rglob("*.py")} - {ROOT / "rocket_core/linalg/kernels/__init__.py"}):
        strings = [node.value for node in ast.walk(parsed(file)) if isinstance(node, ast.Constant)]
        named = any(isinstance(text, str) and text.startswith("cuda") for text in strings)
        if named or ".cuda" in file.read_text(encoding="utf-8"):
            mentions.append(str(file.relative_to(ROOT)))
    assert mentions == []


def test_every_error_code_is_unique():
    from rocket_core import errors

    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.RocketError)]
    codes = [vars(kind).get("code") for kind in kinds]
    assert None not in codes
    assert len(set(codes)) == len(codes)
    drawn = errors.__doc__
    assert all(kind.__name__ in drawn for kind in kinds)
