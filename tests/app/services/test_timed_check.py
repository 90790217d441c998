import threading
import time

import pytest

from app.services.timed_check import TimedCheck
from tests.worker.waiting import eventually


@pytest.fixture
def hanging():
    """A question that hangs until it is let go, and how often it was asked."""

    class Hanging:
        def __init__(self):
            self.asked = 0
            self.release = threading.Event()

        def __call__(self):
            self.asked += 1
            self.release.wait(30)
            return "late"

    question = Hanging()
    yield question
    question.release.set()


def test_an_answer_in_time_is_returned():
    assert TimedCheck(lambda: "yes").ask(5) == "yes"


def test_each_call_asks_again():
    answers = iter("ab")
    check = TimedCheck(lambda: next(answers))
    assert (check.ask(5), check.ask(5)) == ("a", "b")


def test_a_hanging_question_occupies_one_thread_only(hanging):
    check = TimedCheck(hanging)
    began = time.monotonic()
    assert [check.ask(0.05) for _ in range(5)] == [None] * 5
    assert time.monotonic() - began < 2
    assert hanging.asked == 1


def test_a_probe_asks_again_after_a_late_answer(hanging):
    check = TimedCheck(hanging)
    assert check.ask(0.01) is None
    hanging.release.set()
    eventually(lambda: check.ask(5) == "late" and hanging.asked == 2)


def test_concurrent_callers_share_the_answer(hanging):
    check = TimedCheck(hanging)
    first, second = check.start(), check.start()
    hanging.release.set()
    assert (first.wait(5), second.wait(5)) == ("late", "late")
    assert hanging.asked == 1
