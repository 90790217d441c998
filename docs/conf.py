"""Configuration of Sphinx: `make docs`."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

from pydantic import BaseModel
from sphinx.util.typing import stringify_annotation

FOLDER = Path(__file__).parent
# Sphinx imports the documented packages, and the extension in the folder of this file.
sys.path[:0] = [str(FOLDER.parent), str(FOLDER)]

import rocket_core  # noqa: E402

project = "Rocket"
author = "The Rocket Authors"
project_copyright = "2026 The Rocket Authors"
version = release = rocket_core.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "reference_pages"]
exclude_patterns = ["reference_pages", "static"]

# Do not turn the two hyphens of `--option` into a dash.
smartquotes = False
# Headings have the same anchors as on GitHub.
myst_heading_anchors = 4

# A service on the reader's machine.
linkcheck_ignore = [r"http://127\.0\.0\.1"]

html_theme = "furo"
html_title = f"Rocket {release}"
html_static_path = ["static"]
html_css_files = ["rocket.css"]
html_copy_source = False
html_show_sourcelink = False

# In docstrings, as in Markdown, backquotes are code.
default_role = "literal"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "exclude-members": "model_config"}
maximum_signature_line_length = 88
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
# Attributes are a list below the class; their types are in its signature or its schema.
napoleon_use_ivar = True

# Types of other projects, and our own types without a page.
nitpick_ignore_regex = [("py:.*", r"(?!rocket_core\.(pipeline|config|errors|report)\.|rocket_client\.client\.).*")]

_TREE = re.compile(r"^\s*[├│└]")
_TO_THE_ROOT = re.compile(r"\]\(((?:\.\./)*)\.\./(CHANGELOG|CONTRIBUTING|SECURITY)\.md")


def _link_to_pages(_app: Any, _page: str, content: list[str]) -> None:
    """Turn links to files in the root that are also pages of the site into links to these pages."""
    content[0] = _TO_THE_ROOT.sub(lambda link: f"]({link[1]}{link[2].lower()}.md", content[0])


def _leave_out_fields(_app: Any, what: str, _name: str, thing: Any, *_rest: Any) -> tuple[str, None] | None:
    """Remove the signature of a model, which repeats the fields that are listed below it."""
    return ("", None) if what == "class" and hasattr(thing, "model_fields") else None


def _as_restructured_text(_app: Any, _what: str, _name: str, _thing: Any, _options: Any, lines: list[str]) -> None:
    """Turn indented blocks and drawn trees in docstrings into code, as in Markdown."""
    written: list[str] = []
    for number, line in enumerate(lines):
        below, further, *_rest = [*lines[number + 1 :], "", ""]
        indent = len(line) - len(line.lstrip())
        if line.strip() == "Example:":
            written += [line + ":", ""]
        elif line.endswith(":") and not below.strip() and further.startswith(" " * (indent + 4)):
            written.append(line + ":")
        elif _TREE.match(below) and not _TREE.match(line):
            written += [".. code-block:: text", "", "   " + line]
        elif _TREE.match(line):
            written.append("   " + line)
        else:
            written.append(line)
    lines[:] = written


def _list_fields(_app: Any, what: str, _name: str, thing: Any, _options: Any, lines: list[str]) -> None:
    """Add the fields of a model, inherited ones too, with their descriptions and without the ranges of their types."""
    if what != "class" or not issubclass(thing, BaseModel):
        return
    annotations = {name: field.annotation for name, field in thing.model_fields.items()}
    types = get_type_hints(SimpleNamespace(__annotations__=annotations))
    lines.append("")
    for name, field in thing.model_fields.items():
        lines.append(f":ivar {name}: {' '.join((field.description or '').split())}")
        lines.append(f":vartype {name}: {stringify_annotation(types[name], 'smart')}")
    lines.append("")


def _skip_fields(_app: Any, what: str, name: str, member: Any, *_rest: Any) -> bool | None:
    """Leave fields out of the members of a class, as they are in its list; members are methods and properties."""
    if "[" in name:
        # pydantic adds each generic model with its argument to the module.
        return True
    return True if what == "class" and not callable(member) and not isinstance(member, property) else None


def setup(app: Any) -> None:
    """Connect the functions above to Sphinx's events."""
    app.connect("autodoc-process-docstring", _list_fields, priority=600)
    app.connect("autodoc-skip-member", _skip_fields)
    # This must run before napoleon, which also writes indented fields.
    app.connect("autodoc-process-docstring", _as_restructured_text, priority=400)
    app.connect("source-read", _link_to_pages)
    app.connect("autodoc-process-signature", _leave_out_fields)
