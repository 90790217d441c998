import io
import json
import logging
import threading

import pytest

from app.shared.logging import configure_logging, current_request_id, log_context
from app.shared.settings import Settings


@pytest.fixture
def lines():
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    stream = io.StringIO()

    def configure(fields=None, **settings):
        configure_logging(Settings(**settings), stream, **(fields or {}))
        return stream

    yield configure
    root.handlers[:] = before
    root.setLevel(level)
    logging.captureWarnings(False)


def test_a_line_names_its_request_and_job(lines):
    stream = lines(log_format="json")
    with log_context(request_id="r1"), log_context(job_id="j1"):
        logging.getLogger("app").info("hello %s", "you", extra={"layers": 3})
    logging.getLogger("app").info("outside")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first["message"] == "hello you"
    assert (first["request_id"], first["job_id"], first["layers"]) == ("r1", "j1", 3)
    assert "request_id" not in second


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_secrets_are_masked_in_messages_fields_and_traces(lines, monkeypatch, log_format):
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    stream = lines(log_format=log_format)
    try:
        raise ValueError("bad token hf_canary")
    except ValueError:
        logging.getLogger("app").exception("failed with hf_canary", extra={"token": "hf_canary"})
    assert "failed with [secret]" in stream.getvalue()
    assert "ValueError" in stream.getvalue()
    assert "hf_canary" not in stream.getvalue()


FORGED = "2026-01-01T00:00:00.000+00:00 error   app: all is lost"
LINE_BREAKS = ["\n", "\r", "\r\n", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]
CONTROLS = ["\x00", "\x08", "\x1b[2K\x1b[1A", "\x7f", "\x9b", "\u202e", "\udc80"]


class Unruly:
    def __init__(self, text):
        self.text = text

    def __repr__(self):
        return self.text


@pytest.mark.parametrize("log_format", ["text", "json"])
@pytest.mark.parametrize("separator", LINE_BREAKS + CONTROLS, ids=ascii)
def test_no_part_of_a_record_can_forge_a_line(lines, log_format, separator):
    stream = lines(log_format=log_format)
    forging = f"x{separator}{FORGED}"
    with log_context(request_id=forging):
        logging.getLogger(forging).info("model %s", forging, extra={"a": forging, forging: 1, "b": Unruly(forging)})
    written = stream.getvalue()
    assert written.endswith("\n")
    # `splitlines` breaks lines wherever any reader of a log may.
    assert len(written.splitlines()) == 1
    assert written[:-1].isprintable()
    if log_format == "json":
        assert json.loads(written)["message"] == f"model {forging}"


@pytest.mark.parametrize("log_format", ["text", "json"])
@pytest.mark.parametrize("separator", LINE_BREAKS + CONTROLS, ids=ascii)
def test_no_trace_line_looks_like_a_log_line(lines, log_format, separator):
    stream = lines(log_format=log_format)
    try:
        raise ValueError(f"x{separator}{FORGED}")
    except ValueError:
        logging.getLogger("app").exception("failed")
    first, *rest = stream.getvalue().splitlines()
    assert "failed" in first
    assert "ValueError" in (first if log_format == "json" else "".join(rest))
    assert [line for line in rest if not line.startswith("  | ")] == []
    assert bool(rest) == (log_format == "text")


def test_the_level_comes_from_the_settings(lines):
    stream = lines(log_level="warning")
    logging.getLogger("app").info("quiet")
    logging.getLogger("app").warning("loud")
    assert "quiet" not in stream.getvalue()
    assert "loud" in stream.getvalue()


def test_process_wide_fields_are_in_every_line(lines):
    stream = lines({"job_id": "j1"}, log_format="json")
    thread = threading.Thread(target=lambda: logging.getLogger("app").info("of a thread"))
    thread.start()
    thread.join()
    assert json.loads(stream.getvalue())["job_id"] == "j1"


def test_the_request_id_is_known_only_within_its_context():
    with log_context(request_id="r1"), log_context(job_id="j1"):
        assert current_request_id() == "r1"
    assert current_request_id() is None
