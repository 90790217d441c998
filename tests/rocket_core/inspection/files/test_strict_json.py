"""Untrusted JSON: what is parsed, and what is rejected with a message that repeats none of it."""

import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocket_core.inspection.files.strict_json import Limits, is_field_name, parse_object

LIMITS = Limits(depth=4, values=100)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**100), 2**100) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=5), VALUES, max_size=4))
def test_other_values_are_parsed_as_json(value):
    assert parse_object(json.dumps(value).encode()) == value


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not valid JSON at line 1"),
        (b"{\n1}", "not valid JSON at line 2"),
        (b"\xff", "not valid UTF-8"),
        (b"[]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": 1, "a": 1}', "a occurs twice"),
        (b'{"b": {"a": 1, "a": 1}}', "a occurs twice"),
        (b'{"my canary": 1, "my canary": 2}', "a key occurs twice"),
        (b'{"a": ' + b"9" * 41 + b"}", "an integer of more than 40 digits"),
        (b'{"a": ' + b"9" * 5000 + b"}", "an integer of more than 40 digits"),
        (b'{"a": [[[[]]]]}', "more than 4 levels of objects and lists"),
        (b'{"a": [' + b"1," * 100 + b"1]}", "more than 100 values"),
        (b'{"a": [' + b"[]," * 100 + b"1]}", "more than 100 values"),
    ],
)
def test_ambiguous_json_is_refused(raw, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        parse_object(raw, limits=LIMITS)


def test_values_at_the_limits_are_accepted():
    assert parse_object(b'{"a": [[[]]]}', limits=LIMITS) == {"a": [[[]]]}
    assert len(parse_object(json.dumps({"a": [1] * 99}).encode(), limits=LIMITS)["a"]) == 99
    assert parse_object(b'{"a": ' + b"9" * 40 + b"}")["a"] == 10**40 - 1
    assert math.isinf(parse_object(b'{"a": 1e400}')["a"])


def test_only_field_names_may_be_repeated_in_messages():
    assert is_field_name("num_hidden_layers")
    assert not any(map(is_field_name, ["", "a b", "a" * 65, "<script>", "a\n", "\u0430"]))
