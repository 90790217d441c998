"""Processes that are compromised by the files they read, in place of `app.services.judge_process.run`."""

import os
import signal
import socket
import time


def _question(channel):
    with channel.makefile("rb") as stream:
        return stream.read()


def dies(descriptors):
    with socket.socket(fileno=descriptors[0]) as channel:
        _question(channel)
        os.kill(os.getpid(), signal.SIGSEGV)


def exits(descriptors):
    with socket.socket(fileno=descriptors[0]) as channel:
        _question(channel)


def exits_at_once(_descriptors):
    os._exit(1)


def hangs(descriptors):
    with socket.socket(fileno=descriptors[0]) as channel:
        _question(channel)
        time.sleep(600)


def never_reads(_descriptors):
    time.sleep(600)


def writes_endlessly(descriptors):
    with socket.socket(fileno=descriptors[0]) as channel:
        _question(channel)
        while True:
            channel.sendall(b'"' * 2**16)


def drips(descriptors):
    with socket.socket(fileno=descriptors[0]) as channel:
        _question(channel)
        while True:
            channel.sendall(b" ")
            time.sleep(0.05)


def _answers(answer):
    def answers(descriptors):
        with socket.socket(fileno=descriptors[0]) as channel:
            _question(channel)
            channel.sendall(answer)

    return answers


speaks_no_json = _answers(b"\xff\xfe")
names_no_error = _answers(b'{"refusal": {"code": "KeyboardInterrupt", "message": "x"}}')
names_a_base_error = _answers(b'{"refusal": {"code": "app_error", "message": "x"}}')
sends_more = _answers(b'{"figures": null, "__class__": "x"}')
sends_a_long_message = _answers(b'{"refusal": {"code": "rocket_error", "message": "' + b"x" * 10_000 + b'"}}')
sends_a_figure_that_is_none = _answers(
    b'{"figures": {"commit": null, "parameters": -1, "stored_bytes": 1, "compressible_parameters": 1, '
    b'"kept_parameters": 1, "factored_bytes": 1, "ratio": 0.5, "nearest_ratio": 0.5, "calibration_tokens": 1, '
    b'"memory_bytes": 1, "disk_bytes": 1}}'
)
sends_a_huge_number = _answers(b'{"figures": null, "fault": [' + b"9" * 60_000 + b"]}")
forges_a_log_line = _answers(
    b'{"refusal": {"code": "rocket_error", "message": "x"}, "fault": ["ok\\n2026 error forged"]}'
)


def has_little_memory(descriptors):
    """Read normally, with a sixteenth of the memory, without hostile intent."""
    from app.services import judge_process

    judge_process.MEMORY_BYTES //= 16
    judge_process.run(descriptors)


def meets_a_bug(descriptors):
    """Raise an unexpected error, without hostile intent."""
    from app.services import judge_process

    def judge(_question):
        raise KeyError("a stranger's word")

    judge_process.judge = judge
    judge_process.run(descriptors)


def prints_a_log_line(descriptors):
    """Print lines where the service's log is, once it is confined."""
    from app.services import judge_process

    def judge(_question):
        for standard in (1, 2):
            os.write(standard, b"2026-01-01T00:00:00.000+00:00 error   app.api: forged\n")
        raise ValueError

    judge_process.judge = judge
    judge_process.run(descriptors)


def reports_secrets(descriptors):
    """Answer with what can be read of the service: its environment, its files, the other processes."""
    from pathlib import Path

    from app.services.judge_process import _confine
    from app.services.questions import Answer, Question, Refusal
    from rocket_core.errors import RocketError

    with socket.socket(fileno=descriptors[0]) as channel:
        question = Question.model_validate_json(_question(channel))
        _confine(question)
        found = sorted(os.environ)
        api = os.environ.get("LC_API_PID")
        for path in (question.dataset, *([] if api is None else [f"/proc/{api}/environ"])):
            try:
                found.append(Path(path).read_text())
            except OSError as error:
                found.append(type(error).__name__)
        try:
            socket.create_connection(("127.0.0.1", 1)).close()
        except OSError as error:
            found.append(type(error).__name__)
        answer = Answer(refusal=Refusal.of(RocketError(" ".join(found))))
        channel.sendall(answer.model_dump_json().encode())
