"""Programs of children of a fork server in its tests; only its template imports them."""

import json
import os
import resource
import signal
import socket
import sys
import threading
import time
from pathlib import Path


def describe(descriptors):
    """Report the state of the process, as JSON."""
    with socket.socket(fileno=descriptors[0]) as channel:
        asked = channel.recv(1000).decode()
        found = {
            "asked": asked,
            "environment": dict(os.environ),
            "modules": sorted(sys.modules),
            "threads": threading.active_count(),
            "parent": os.getppid(),
            "descriptors": sorted(int(entry.name) for entry in os.scandir("/proc/self/fd")) if _is_linux() else [],
            "path": sys.path,
            "ignored": [number.name for number in (signal.SIGTERM, signal.SIGINT) if _is_ignored(number)],
        }
        channel.sendall(json.dumps(found).encode())


def act(descriptors):
    """Do what one word asks for."""
    with socket.socket(fileno=descriptors[0]) as channel:
        word = channel.recv(100).decode()
        if word == "echo":
            channel.sendall(b"echo")
        elif word == "sleep":
            channel.sendall(b"asleep")
            time.sleep(600)
        elif word == "spin":
            resource.setrlimit(resource.RLIMIT_CPU, (1, 2))
            while True:
                pass
        elif word == "exit":
            sys.exit(7)
        elif word == "raise":
            raise ValueError("as asked")


def sleep_at_once(_descriptors):
    time.sleep(600)


def _is_ignored(number):
    return signal.getsignal(number) is signal.SIG_IGN


def _is_linux():
    return Path("/proc/self/fd").is_dir()
