import threading
import time

import pytest

from app.services.timed_probe import Probe
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
    assert Probe(lambda: "yes").ask(5) == "yes"


def test_each_question_is_asked_anew():
    answers = iter("ab")
    probe = Probe(lambda: next(answers))
    assert (probe.ask(5), probe.ask(5)) == ("a", "b")


def test_a_question_that_hangs_costs_one_thread_however_often_it_is_asked(hanging):
    probe = Probe(hanging)
    began = time.monotonic()
    assert [probe.ask(0.05) for _ in range(5)] == [None] * 5
    assert time.monotonic() - began < 2
    assert hanging.asked == 1


def test_once_it_has_come_back_it_is_asked_again(hanging):
    probe = Probe(hanging)
    assert probe.ask(0.01) is None
    hanging.release.set()
    eventually(lambda: probe.ask(5) == "late" and hanging.asked == 2)


def test_several_that_ask_at_once_share_the_answer(hanging):
    probe = Probe(hanging)
    first, second = probe.begin(), probe.begin()
    hanging.release.set()
    assert (first.wait(5), second.wait(5)) == ("late", "late")
    assert hanging.asked == 1
