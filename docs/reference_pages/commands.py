"""The command line as Markdown."""

import re
import subprocess
import sys

_EPILOG = re.compile(r"^`rocket help exit-codes` lists the exit codes\.\n*", flags=re.MULTILINE)
# Truncated after a few words each; the headings are the same list.
_LIST = re.compile(r"^\*\*Commands\*\*:\n\n(?:\* .*\n)+\n*", flags=re.MULTILINE)
_TITLE = re.compile(r"\A# `rocket`\n+")


def command_line() -> str:
    """Return all commands with their options, without the reference to the exit codes, which every command repeats."""
    asked = [sys.executable, "-m", "typer", "rocket_cli.main", "utils", "docs", "--name", "rocket"]
    # In a separate process, which does not change the state of this one.
    written = subprocess.run(asked, check=True, capture_output=True, text=True, encoding="utf-8")  # noqa: S603
    text = written.stdout
    for superfluous in (_EPILOG, _LIST, _TITLE):
        text = superfluous.sub("", text)
    return text
