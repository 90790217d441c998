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


def test_an_answer_in_time_is_given():
    assert TimedCheck(lambda: "yes").ask(5) == "yes"


def test_each_question_is_asked_anew():
    answers = iter("ab")
    check = TimedCheck(lambda: next(answers))
    assert (check.ask(5), check.ask(5)) == ("a", "b")


def test_a_question_that_hangs_costs_one_thread_however_often_it_is_asked(hanging):
    check = TimedCheck(hanging)
    began = time.monotonic()
    assert [check.ask(0.05) for _ in range(5)] == [None] * 5
    assert time.monotonic() - began < 2
    assert hanging.asked == 1


def test_once_it_has_come_back_it_is_asked_again(hanging):
    check = TimedCheck(hanging)
    assert check.ask(0.01) is None
    hanging.release.set()
    eventually(lambda: check.ask(5) == "late" and hanging.asked == 2)


def test_several_that_ask_at_once_share_the_answer(hanging):
    check = TimedCheck(hanging)
    first, second = check.start(), check.start()
    hanging.release.set()
    assert (first.wait(5), second.wait(5)) == ("late", "late")
    assert hanging.asked == 1
