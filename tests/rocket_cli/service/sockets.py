"""Clients that write HTTP by hand, and the server that `rocket serve` runs, in this process."""

import asyncio
import contextlib
import json
import re
import select
import socket
import threading
import time

from rocket_cli.service.server import build_server
from tests.loopback_service import wait_for

HEAD = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
# Long enough for a busy machine; anything slower than that has no deadline at all.
PATIENCE = 30.0


class Connection:
    """A client's connection without time limits."""

    def __init__(self, address, *, source="127.0.0.1", receive_buffer=None):
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(PATIENCE)
        self.socket.bind((source, 0))
        self.socket.connect(address)

    def send(self, data):
        self.socket.sendall(data)

    def read(self):
        """Return everything until the server closes the connection."""
        found = b""
        try:
            while data := self.socket.recv(2**16):
                found += data
        except ConnectionResetError:
            pass
        return found

    def ask(self, request=HEAD + b"\r\n"):
        """Return one response with a `Content-Length`."""
        self.send(request)
        found = b""
        while b"\r\n\r\n" not in found:
            data = self.socket.recv(2**16)
            assert data, found
            found += data
        head, _, body = found.partition(b"\r\n\r\n")
        length = int(re.search(rb"content-length: (\d+)", head, re.IGNORECASE)[1])
        while len(body) < length:
            body += self.socket.recv(2**16)
        return int(head.split()[1]), body

    def drip(self, data=b" "):
        """Send a byte now and then until the server refuses more, and return what it says."""
        until = time.monotonic() + PATIENCE
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while self.is_open():
                assert time.monotonic() < until, "the server takes everything"
                self.send(data)
                time.sleep(0.05)
        return self.read()

    def is_open(self):
        """Return whether nothing has come from the server, not even the end."""
        return not select.select([self.socket], [], [], 0)[0]

    def close(self):
        self.socket.close()


class LimitedServer:
    """The server of `rocket serve`, in a thread of this process."""

    def __init__(self, app):
        self.app = app
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        self.loop = None
        self.server = build_server(app, on_ready=self._on_ready)
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]})
        self._thread.start()
        # The server is started a moment before it is told to be ready.
        wait_for(lambda: self.loop)

    @contextlib.contextmanager
    def stalled(self):
        """Block the event loop."""
        stall = threading.Event()
        self.loop.call_soon_threadsafe(stall.wait, PATIENCE)
        try:
            yield
        finally:
            stall.set()

    def _on_ready(self):
        self.loop = asyncio.get_running_loop()

    def stop(self):
        self.app.state.streams.close()
        self.server.should_exit = True
        self._thread.join()


def problem_of(answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    assert b"content-type: application/problem+json" in head.lower()
    return int(head.split()[1]), json.loads(body)["code"]
