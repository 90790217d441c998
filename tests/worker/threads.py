"""An attempt whose processes are threads of this one, so that a test can modify the library and need not load it again.

They use the same connection and run the same code, except for the confinement; `test_isolation` and `test_runner`
have real processes.
"""

import socket
import threading

from worker.attempt.job import Attempt
from worker.confined.computation import Computation
from worker.confined.confinement import CONFINEMENT
from worker.confined.fetch import fetch
from worker.confined.messages import COMPUTE_REQUEST, FETCH_REQUEST, UPLOAD_REQUEST
from worker.confined.push import push
from worker.processes.channel import Channel, ChannelError
from worker.processes.children import COMPUTE_PROGRAM, PUSH_PROGRAM, Ending
from worker.processes.isolation import Isolation

KILLED = -9


class ChildThread:
    """In place of `worker.processes.children.ChildProcess`.

    Args:
        program: which of the programs to run.
        should_cancel: asked at every step.
    """

    pid = None

    def __init__(self, program, should_cancel):
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        self._thread = threading.Thread(target=self._run, args=(program, Channel(theirs), should_cancel), daemon=True)
        self._thread.start()

    def ask_to_stop(self):
        """Do nothing, as the thread itself checks whether to stop."""

    def wait(self):
        return self.kill()

    def kill(self):
        self.channel.close()
        self._thread.join(60)
        assert not self._thread.is_alive()
        return Ending(exit_code=KILLED, last_words="")

    def _run(self, program, channel, should_cancel):
        try:
            channel.receive(CONFINEMENT)
            if program is COMPUTE_PROGRAM:
                Computation(
                    channel,
                    channel.receive(COMPUTE_REQUEST),
                    should_cancel=should_cancel,
                    close_network=lambda: None,
                ).run()
            elif program is PUSH_PROGRAM:
                push(channel, channel.receive(UPLOAD_REQUEST), should_cancel=should_cancel)
            else:
                fetch(channel, channel.receive(FETCH_REQUEST), should_cancel=should_cancel)
        except ChannelError:
            pass
        finally:
            channel.close()


class ThreadedAttempt(Attempt):
    """An attempt without processes.

    Args:
        stop: asked at every step of the library, and of the attempt itself when that has said so.
    """

    def __init__(self, settings, database, lease, stop, device="auto"):
        class Both(threading.Event):
            """An event that also sets the test's own event, which may ignore it."""

            def set(self):
                super().set()
                stop.set()

        own = Both()

        def should_cancel():
            is_set = stop.is_set()
            if is_set:
                own.set()
            return is_set

        def launch(program, environment, name, sandbox):
            return ChildThread(program, should_cancel)

        super().__init__(settings, database, lease, own, device, isolation=Isolation(), launch=launch)
