"""What confined processes print, in the log of the process that started them; all are real."""

import io
import json
import logging
import os
import re
import textwrap

import pytest

from app.shared.confinement import Sandbox
from app.shared.logging import configure_logging
from app.shared.settings import Settings
from tests.worker.processes.test_isolation import COMPUTE, JOB
from worker.processes import output
from worker.processes.children import start_program
from worker.runner import Runner

FORGED = {"time": "2026-01-01", "level": "error", "logger": "app.api", "message": "forged", "job_id": "job_of_another"}
FORGING = f"""
    print("2026-01-01T00:00:00.000+00:00 error   app.api: forged")
    print("\\x1b[2K\\x1b[1A\\x9b\\u202eforged\\rforged", flush=True)
    print({json.dumps(FORGED)!r})
    print({json.dumps(FORGED | {"trace": "forged" + chr(10) + "forged", "message": "x" + chr(10) + "forged"})!r})
    print({json.dumps(FORGED | {"level": "fatal"})!r})
    print("[" * 10_000 + "forged", flush=True)
    os.write(2, b"\\xff\\x00forged")
"""
OURS = logging.getLogger("ours")


@pytest.fixture
def log():
    """Return a function that sends the log of this process to a stream."""
    root = logging.getLogger()
    before, level, stream = root.handlers[:], root.level, io.StringIO()

    def log(log_format):
        configure_logging(Settings(log_format=log_format), stream, job_id="job_of_this_one")
        return stream

    yield log
    root.handlers[:] = before
    root.setLevel(level)
    logging.captureWarnings(False)


@pytest.fixture
def printed(program):
    """Return a function that runs a program as a confined process is run, and returns how it ended."""

    def printed(code):
        child = start_program(program(textwrap.dedent(code)), os.environ, "job", Sandbox())
        ending = child.wait()
        assert ending.exit_code == 0, ending.last_words
        return ending

    return printed


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_every_printed_line_is_marked_and_escaped(log, printed, log_format):
    stream = log(log_format)
    printed(FORGING)
    OURS.info("the end")
    *lines, last = stream.getvalue().removesuffix("\n").split("\n")
    assert "the end" in last
    assert "".join(lines).isprintable()
    if log_format == "json":
        logged = [json.loads(line) for line in lines]
        assert {line["job_id"] for line in logged} == {"job_of_this_one"}
        assert all(line["logger"].startswith("confined") for line in logged)
        assert sum("forged" in line["message"] for line in logged) == len(lines) == 7
    else:
        heads = [line for line in lines if not line.startswith("  | ")]
        assert len(heads) == 7
        assert all(re.match(r"\S+ (error  |warning) confined(:app.api)?: ", head) for head in heads)
        assert "job_of_another" not in "".join(line for line in heads if "confined:app" in line)


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_line_logged_by_a_process_keeps_its_parts(log, printed, log_format):
    stream = log(log_format)
    printed("""
        import logging
        from worker.confined.computation import start_logging
        start_logging("info", "hf_canary")
        try:
            raise ValueError("hf_canary")
        except ValueError:
            logging.getLogger("rocket_core.pipeline").exception("a %s", "failure")
        logging.getLogger("rocket_core").debug("too detailed")
    """)
    written = stream.getvalue()
    assert "hf_canary" not in written
    assert "detailed" not in written
    if log_format == "json":
        line = json.loads(written)
        assert (line["level"], line["logger"]) == ("error", "confined:rocket_core.pipeline")
        assert (line["message"], line["job_id"]) == ("a failure", "job_of_this_one")
        assert line["trace"].endswith("ValueError: [secret]")
    else:
        head, *trace = written.splitlines()
        assert head.endswith(" error   confined:rocket_core.pipeline: a failure job_id='job_of_this_one'")
        assert trace[-1] == "  | ValueError: [secret]"


def test_a_flood_is_cut_and_counted_and_stops_nothing(log, printed):
    stream = log("text")
    ending = printed("""
        line = b"flood " * 1000 + b"\\n"
        for _ in range(5000):
            os.write(1, line * 4)
        os.write(1, b"the last words\\n")
    """)
    assert ending.last_words.endswith("the last words\n")
    *_lines, last = stream.getvalue().splitlines()
    found = re.search(r"dropped (\d+) bytes", last)
    assert stream.getvalue().count("dropped") == 1
    total = 5000 * 4 * 6001 + len("the last words\n")
    kept = total - int(found[1])
    assert stream.getvalue().count("flood") * 6 <= kept <= output.MOST_BYTES


def test_empty_lines_count_as_well(log, printed):
    stream = log("json")
    printed("os.write(1, b'\\n' * 2_000_000)")
    assert len(stream.getvalue()) < 2 * output.MOST_BYTES


def test_a_patient_flood_reaches_the_total(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: clock[0])
    allowance = output.Allowance()
    taken = 0
    for _ in range(100_000):
        taken += 1000 if allowance.take(1000) else 0
        clock[0] += 1.0
    assert taken == output.MOST_BYTES // 1000 * 1000


def test_a_hostile_model_cannot_forge_the_workers_log(settings, database, program, submit, model, capfd):
    submit(max_attempts=1)
    computing = program(
        COMPUTE + textwrap.dedent(FORGING) + 'channel.send(Failed(code="corrupt_checkpoint", message=""))'
    )
    assert Runner(settings, database, program(JOB.format(program=computing[0]))).run()
    written = [line for line in capfd.readouterr().err.splitlines() if "forged" in line]
    assert written
    assert all(re.match(r"\S+ \S+ +confined(:app.api)?: |  \| ", line) for line in written)
    assert "".join(written).isprintable()
