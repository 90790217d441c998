"""Lines of calibration files whose JSON would occupy the interpreter for long."""

import pytest

from app.services.uploads import _MAX_STRUCTURE, DocumentCheck
from rocket_core.errors import CalibrationError

LONG = 2**23 - 100


def check(line):
    document_check = DocumentCheck(".jsonl")
    for _ in document_check.passing(line[start : start + 65536] for start in range(0, len(line), 65536)):
        pass
    return document_check.documents


def record(value):
    return b'{"text": "a", "x": ' + value + b"}"


@pytest.mark.parametrize(
    "line",
    [
        record(b"[" + b",".join([b"[" * 900 + b"]" * 900] * (LONG // 1801)) + b"]"),
        record(b"[" + b",".join([b"[]"] * (LONG // 3)) + b"]"),
        record(b"[" + b",".join([b'{"":0}'] * (LONG // 7)) + b"]"),
        record(b"[" + b",".join([b'"\\""'] * (LONG // 5)) + b"]"),
        record(b"[" + b",".join([b"1e9"] * (LONG // 4)) + b"]"),
        record(b"[" * LONG),
        record(b"1" * LONG),
        b'{"text": "a",' + b",".join(b'"%x":0' % number for number in range(LONG // 10)) + b"}",
    ],
    ids=["nested", "lists", "objects", "strings", "numbers", "deep", "digits", "keys"],
)
def test_a_line_of_mostly_non_text_is_refused(line):
    with pytest.raises(CalibrationError, match="line 1 has more than 262144 characters that are not text"):
        check(line)


@pytest.mark.parametrize(
    "text",
    [
        b"a" * LONG,
        b"\\n" * (LONG // 2),
        b'\\"' * (LONG // 2),
        b"\\\\" * (LONG // 2),
        b"[{,:}]" * (LONG // 6),
        b"\xc3\xa9" * 10**6,
    ],
    ids=["letters", "escapes", "quotes", "backslashes", "punctuation", "accents"],
)
def test_a_long_text_is_accepted_whatever_it_contains(text):
    assert check(b'{"text": "' + text + b'"}') == 1


def test_structure_up_to_the_limit_is_accepted():
    padding = _MAX_STRUCTURE - len('{: "", : []}') - len('""""')
    line = b'{"text": "' + b"a" * 10**6 + b'", "x": [' + b" " * (padding - 10) + b"]}"
    assert check(line) == 1
    with pytest.raises(CalibrationError, match="not text"):
        check(line.replace(b"[", b"[" + b" " * 20))


def test_an_invalid_json_line_is_still_reported_as_such():
    for line in (b'{"text": "' + b"a" * 10**6, b'{"text": "' + b"a" * 10**6 + b"\\", b"\\" * 1000):
        with pytest.raises(CalibrationError, match="not valid JSON"):
            check(line)


def test_a_line_that_names_an_image_is_refused():
    lines = b'{"text": "a", "image": null}\n{"text": "b", "image": "1.png"}\n'
    with pytest.raises(CalibrationError, match="line 2 names an image, and an upload holds no images"):
        list(DocumentCheck(".jsonl").passing([lines]))


@pytest.mark.parametrize(
    "line",
    [
        b'{"messages": [{"role": "user", "content": "Hi"}]}',
        b'{"conversations": [{"from": "human", "value": "Hi"}]}',
        b'{"instruction": "Hi", "input": "", "output": "Yes"}',
        b'{"prompt": "Hi", "completion": "Yes"}',
    ],
)
def test_a_chat_is_a_document(line):
    assert check(line + b"\n" + line) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"body": "Hi"}', 'line 1 has no string "text" and no chat.*--calibration-column'),
        (b'{"conversations": [{"from": "alien", "value": "Hi"}]}', "line 1 has no string"),
        (b'{"prompt": "Hi\\u0000", "completion": "Yes"}', "line 1 contains a NUL"),
        (b'{"messages": "' + b"[" * 300_000 + b'"}', "line 1 has no string .*chats may have 262144 characters"),
        (b'["text"]', "line 1 is not a JSON object"),
    ],
)
def test_a_line_without_text_or_a_usable_chat_is_refused(line, message):
    with pytest.raises(CalibrationError, match=message):
        check(line)
