"""Receivers of webhooks that take all the time they can."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from benchmarks.attacks.target import Target

# Another tenant's delivery, from when it is queued.
MOST_SECONDS = 5.0
# As many webhooks as a tenant may have by default.
WEBHOOKS = 10


def silent_webhooks(target: Target) -> str:
    """Make ten addresses that accept connections and never answer receive deliveries."""
    return _deliver_meanwhile(target, lambda _connection: time.sleep(60))


def dripping_webhooks(target: Target) -> str:
    """Make ten addresses that answer with one header a second, without an end, receive deliveries."""
    return _deliver_meanwhile(target, _drip)


def _drip(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 204 No Content\r\n")
    for number in range(60):
        connection.sendall(f"X-{number}: a\r\n".encode())
        time.sleep(1)


def _deliver_meanwhile(target: Target, treat: Callable[[socket.socket], None]) -> str:
    """Return how long another tenant's delivery takes while the attacker's receivers treat theirs in a way."""
    arrived = threading.Event()
    with ExitStack() as opened, target.client() as client, target.client(1) as other:
        held = [opened.enter_context(_receiver(treat)) for _ in range(WEBHOOKS)]
        good = opened.enter_context(_receiver(lambda connection: _accept(connection, arrived)))
        hooks = [(client, client.post("/webhooks", json={"url": url}).raise_for_status().json()["id"]) for url in held]
        hooks.append((other, other.post("/webhooks", json={"url": good}).raise_for_status().json()["id"]))
        try:
            for sender, hook in hooks[:-1]:
                sender.post(f"/webhooks/{hook}/test").raise_for_status()
            time.sleep(1)
            began = time.monotonic()
            other.post(f"/webhooks/{hooks[-1][1]}/test").raise_for_status()
            assert arrived.wait(150), "another tenant's delivery has not arrived after 150 s"
            seconds = time.monotonic() - began
        finally:
            for sender, hook in hooks:
                sender.delete(f"/webhooks/{hook}")
    assert seconds <= MOST_SECONDS, f"another tenant's delivery took {seconds:.1f} s"
    return f"another tenant's delivery took {seconds:.2f} s"


def _accept(connection: socket.socket, arrived: threading.Event) -> None:
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")
    arrived.set()


@contextmanager
def _receiver(treat: Callable[[socket.socket], None]) -> Iterator[str]:
    """Yield the URL of a receiver that treats each connection in a thread."""

    def serve(connection: socket.socket) -> None:
        with suppress(OSError), connection:
            treat(connection)

    def listen() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=listen, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"


ATTACKS: tuple[Callable[[Target], str], ...] = (silent_webhooks, dripping_webhooks)
