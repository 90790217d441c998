"""Search comments, docstrings and documentation for phrases that current technical English does not use.

    python .ci/check_english.py [PATH ...]

Prints `file:line: phrase: text` for each hit and exits with 1 if there are any. A hit that is meant has its reason in
`ALLOWED`.
"""

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

# What is meant is in brackets.
PHRASES = {
    "beside [next to, with]": r"\bbesides?\b",
    "behind [after]": r"\bbehind\b",
    "begun [started]": r"\bbegun\b",
    "go on [continue, resume]": r"\b(?:go(?:es)?|went|going) on\b",
    "lies [is]": r"\blies?\b",
    "stands [is]": r"\bstands?\b(?!-| for| in for)",
    "of its own [its own]": r"\bof (?:its|their|one's|his|her|our|your) own\b",
    "is none [none exists]": r"\b(?:is|are|was|were) none\b",
    "is no X [is not a X]": r"(?<![Tt]here )\b(?:is|are) no (?!longer\b|more\b|less\b|larger\b|later\b|smaller\b)\w+",
    "told of [notified of]": r"\b(?:told|tells?|telling) of\b",
    "shall [must, will]": r"\bshall\b",
    "somebody [a client, a user]": r"\b(?:some|no|any|every)body\b",
    "whoever [clients that]": r"\bwho(?:ever|soever)\b",
    "ring [notify]": r"\b(?:rings?|ringing|doorbell)\b",
    "make good [compensate]": r"\bma(?:de|ke|kes|king) good\b",
    "hand over [pass]": r"\bhand(?:s|ed|ing)? over\b",
    "of ours [our]": r"\bof (?:ours|theirs|mine)\b",
    "stranger [untrusted]": r"\bstrangers?\b",
    "sentence with Of, Has, Who, What": r"(?:^|[.!?] )(?:Of|Has|Have|Who|Whose|Whom)\b(?! course)[^?]*$",
}
ALLOWED: dict[tuple[str, str], str] = {
    ("docs/how-to/service.md", "behind [after]"): "a service is behind a proxy",
    ("docs/how-to/production.md", "behind [after]"): "a service is behind a proxy",
    ("rocket_core/models/block_calls.py", "beside [next to, with]"): "the name of a parameter",
    ("examples/tiny-llama/README.md", "of ours [our]"): "written by train_tiny_llama.py with the model",
    ("SECURITY.md", "behind [after]"): "a service is behind a proxy",
}
_FENCE = re.compile(r"^(```|~~~)")
_CODE = re.compile(r"`[^`]*`|<!--.*?-->")


def python_prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of comments and docstrings, with their numbers."""
    before = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")
        elif token.type == tokenize.STRING and before in {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}:
            for number, line in enumerate(token.string.strip("\"'").split("\n"), token.start[0]):
                yield number, line.strip()
        if token.type not in {tokenize.COMMENT, tokenize.NL, tokenize.ENCODING}:
            before = token.type


def markdown_prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines outside fenced blocks, with their numbers."""
    is_code = False
    for number, line in enumerate(text.split("\n"), 1):
        if _FENCE.match(line):
            is_code = not is_code
        elif not is_code:
            yield number, line


def hits(path: Path) -> Iterator[str]:
    """Yield what is found in a file."""
    prose = python_prose if path.suffix == ".py" else markdown_prose
    for number, line in prose(path.read_text(encoding="utf-8")):
        for name, pattern in PHRASES.items():
            if (path.as_posix(), name) not in ALLOWED and re.search(pattern, _CODE.sub("`", line)):
                yield f"{path}:{number}: {name}: {line.strip()}"


def main(arguments: list[str]) -> int:
    """Search the given paths, or all tracked Python and Markdown files."""
    listed = subprocess.run(["git", "ls-files", *arguments], check=True, capture_output=True, text=True).stdout
    files = [Path(name) for name in listed.splitlines() if name.endswith((".py", ".md"))]
    found = [hit for file in files for hit in hits(file)]
    print("\n".join([*found, f"{len(found)} phrases"]) if found else f"{len(files)} files without archaic phrases")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
