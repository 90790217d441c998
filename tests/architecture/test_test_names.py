"""The length of test names, and the places of tests."""

import re
from pathlib import Path

TESTS = Path(__file__).parent.parent
MAX_CHARACTERS = 60
NAME = re.compile(r"^ *(?:async )?def (test_\w+)", flags=re.MULTILINE)


def test_test_names_have_at_most_60_characters():
    files = sorted(TESTS.rglob("test_*.py"))
    found = [(file.name, name) for file in files for name in NAME.findall(file.read_text(encoding="utf-8"))]
    assert len(found) > 1000
    assert [(file, name) for file, name in found if len(name) > MAX_CHARACTERS] == []


def test_tests_of_the_system_are_where_make_looks():
    makefile = (TESTS.parent / "Makefile").read_text(encoding="utf-8")
    [searched] = re.findall(r"^SYSTEM := (.+)$", makefile, flags=re.MULTILINE)
    marked = [
        file for file in TESTS.rglob("*.py") if re.search(r"pytest\.mark\.system", file.read_text(encoding="utf-8"))
    ]
    assert marked
    assert [
        file for file in marked if not any(file.is_relative_to(TESTS.parent / one) for one in searched.split())
    ] == []
