import pytest

from rocket_client._retry import RetryBudget, retry_after_seconds


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def waits(patience, clock):
    """Return every wait until the patience ends, with the clock advanced by each."""
    found = []
    while (wait := patience.next_delay()) is not None:
        found.append(wait)
        clock.now += wait
    return found


@pytest.fixture
def clock():
    return Clock()


def test_waits_grow_and_add_up_to_the_patience(clock):
    found = waits(RetryBudget(60, clock=clock), clock)

    assert sum(found) == pytest.approx(60)
    assert found[0] <= 0.25
    for number, wait in enumerate(found[:-1]):
        longest = min(8, 0.25 * 2**number)
        assert longest / 2 <= wait <= longest


def test_waits_are_randomized(clock):
    assert RetryBudget(60, clock=clock).next_delay() != RetryBudget(60, clock=clock).next_delay()


def test_without_patience_there_is_no_wait(clock):
    assert RetryBudget(0, clock=clock).next_delay() is None


def test_retry_after_is_the_minimum_wait(clock):
    assert RetryBudget(60, clock=clock).next_delay(20) == 20


def test_a_retry_after_beyond_the_patience_gives_up_at_once(clock):
    assert RetryBudget(60, clock=clock).next_delay(61) is None


def test_renewing_resets_the_patience(clock):
    patience = RetryBudget(60, clock=clock)
    waits(patience, clock)
    patience.reset()

    assert patience.seconds_left == 60
    assert patience.next_delay() <= 0.25


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("5", 5),
        (" 0 ", 0),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 40),
        ("Thu, 01 Jan 1970 00:00:40 GMT", 0),
        ("soon", None),
        ("-1", None),
        ("²", None),
    ],
)
def test_retry_after_is_a_number_or_a_date(header, seconds):
    assert retry_after_seconds(header, now=60.0) == seconds
