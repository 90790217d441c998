"""The command line as Markdown."""

import re
import subprocess
import sys

_EXIT_CODES = re.compile(r"^Exit codes:\n(?: *\d+  .*\n?)+\n*", flags=re.MULTILINE)
# Cut off after a few words each; the headings are the same list.
_LIST = re.compile(r"^\*\*Commands\*\*:\n\n(?:\* .*\n)+\n*", flags=re.MULTILINE)
_TITLE = re.compile(r"\A# `rocket`\n+")


def command_line() -> str:
    """All commands with their options; without the exit codes, which every command repeats and a page has once."""
    asked = [sys.executable, "-m", "typer", "rocket_cli.main", "utils", "docs", "--name", "rocket"]
    # In a process of its own: what a command reads from the environment as its default is nobody's here.
    written = subprocess.run(asked, check=True, capture_output=True, text=True, encoding="utf-8")  # noqa: S603
    text = written.stdout
    for superfluous in (_EXIT_CODES, _LIST, _TITLE):
        text = superfluous.sub("", text)
    return text
