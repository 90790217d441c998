import signal
import subprocess
import sys
import threading
import time

import pytest

from rocket_core.system.time_limit import time_limit

KILLED = """
import hashlib
from rocket_core.system.time_limit import time_limit
with time_limit(0.1, TimeoutError()):
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
"""


def run_forever():
    while True:
        pass


def test_python_that_does_not_end_is_interrupted():
    before = signal.getsignal(signal.SIGVTALRM)
    with pytest.raises(TimeoutError, match="too long"), time_limit(0.1, TimeoutError("too long")):
        run_forever()
    assert signal.getsignal(signal.SIGVTALRM) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == signal.getitimer(signal.ITIMER_PROF) == (0, 0)


def test_an_error_that_was_caught_is_raised_again():
    caught = []

    def catch_once():
        try:
            run_forever()
        except TimeoutError as error:
            caught.append(error)
        run_forever()

    with pytest.raises(TimeoutError), time_limit(0.1, TimeoutError()):
        catch_once()
    assert len(caught) == 1


def test_compiled_code_is_ended_by_the_kernel():
    ended = subprocess.run([sys.executable, "-c", KILLED], check=False, timeout=60)
    assert ended.returncode == -signal.SIGPROF


def test_waiting_does_not_count():
    with time_limit(0.05, TimeoutError()):
        time.sleep(0.3)


def test_other_threads_have_no_limit():
    done = []

    def work():
        with time_limit(0.01, TimeoutError()):
            start = time.thread_time()
            while time.thread_time() - start < 0.05:
                pass
        done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done
