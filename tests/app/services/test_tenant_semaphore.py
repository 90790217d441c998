import threading
import time
from contextlib import ExitStack

import pytest

from app.services.tenant_semaphore import NoSlotError, TenantSemaphore


@pytest.fixture
def semaphore():
    return TenantSemaphore(most=3, most_of_one=2, waiting=2, waiting_of_one=1)


def test_no_tenant_exceeds_its_share(semaphore):
    with ExitStack() as held:
        held.enter_context(semaphore.acquire("a", 0))
        held.enter_context(semaphore.acquire("a", 0))
        with pytest.raises(NoSlotError) as refused, semaphore.acquire("a", 0):
            pass
        assert refused.value.is_own
        held.enter_context(semaphore.acquire("b", 0))
        with pytest.raises(NoSlotError) as refused, semaphore.acquire("c", 0):
            pass
        assert not refused.value.is_own
    with semaphore.acquire("c", 0), semaphore.acquire("a", 0), semaphore.acquire("a", 0):
        pass


def test_a_released_place_goes_to_a_waiting_request(semaphore):
    first, second, entered = semaphore.acquire("a", 0), semaphore.acquire("a", 0), threading.Event()
    first.__enter__()
    second.__enter__()

    def wait():
        with semaphore.acquire("a", 60):
            entered.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not entered.wait(0.2)
    first.__exit__(None, None, None)
    assert entered.wait(60)
    thread.join()
    second.__exit__(None, None, None)


def test_few_requests_wait_and_the_rest_are_refused_at_once(semaphore):
    with ExitStack() as held:
        for owner in ("a", "a", "b"):
            held.enter_context(semaphore.acquire(owner, 0))
        released, waiting = threading.Event(), []

        def wait(owner):
            with semaphore.acquire(owner, 60):
                released.wait(60)

        for owner in ("a", "b"):
            waiting.append(threading.Thread(target=wait, args=(owner,)))
            waiting[-1].start()
        end = time.monotonic() + 30
        while semaphore._waiting.total() < 2 and time.monotonic() < end:
            time.sleep(0.01)
        begun = time.monotonic()
        for owner in ("a", "c"):
            with pytest.raises(NoSlotError), semaphore.acquire(owner, 600):
                pass
        assert time.monotonic() - begun < 60
    released.set()
    for thread in waiting:
        thread.join()
    assert not semaphore._held
    assert not semaphore._waiting


def test_a_place_is_released_after_an_error(semaphore):
    for _ in range(5):
        with pytest.raises(ZeroDivisionError), semaphore.acquire("a", 0):
            raise ZeroDivisionError
    with semaphore.acquire("a", 0), semaphore.acquire("a", 0):
        pass
