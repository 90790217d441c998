"""The service as a team runs it: API and workers as separate processes, on Postgres and Redis."""

import importlib.util
import signal
import subprocess
from pathlib import Path

import httpx2
import psutil

from tests.e2e.service_process import ROCKET, Service

# Without the commands of the parts, the whole service is one process on the same servers.
IS_SPLIT = importlib.util.find_spec("rocket_cli.service.api") is not None
# Long enough for a busy machine to load torch; a test waits for its end after a worker has been killed.
LEASE_SECONDS = 10


class Deployment(Service):
    """One API and some workers.

    Args:
        data_dir: what they share.
        workers: how many.
        settings: environment variables; with the URLs of database and broker.
    """

    def __init__(self, data_dir: Path, *, workers: int = 1, **settings: str) -> None:
        self._commands = {"api": ["api", "--port", "0"]} if IS_SPLIT else {}
        self._commands |= {f"worker{number}": ["worker", "--queue", "cpu"] for number in range(workers)}
        if not IS_SPLIT:
            self._commands = {"api": ["serve", "--port", "0"]}
        self._processes: dict[str, subprocess.Popen] = {}
        self.deaths: list[str] = []
        self._is_migrated = False
        quick = {"ROCKET_LEASE_SECONDS": str(LEASE_SECONDS), "ROCKET_DATA_DIR": str(data_dir)}
        super().__init__(data_dir, **(quick | settings))

    def start(self) -> None:
        """Migrate once, and start everything that does not run."""
        if IS_SPLIT and not self._is_migrated:
            with self.log.open("ab") as log:
                command = [str(ROCKET), "migrate"]
                subprocess.run(command, check=True, stdout=log, stderr=log, env=self.environment)
            self._is_migrated = True
        self.revive()

    def revive(self) -> None:
        """Start what has died, as a restart policy does."""
        for name in self._commands:
            if name not in self._processes or self._processes[name].poll() is not None:
                if name in self._processes:
                    self.deaths.append(name)
                self._launch(name)

    @property
    def answering_pid(self) -> int:
        """See `Service`."""
        return self.pid("api")

    def pid(self, name: str) -> int:
        """Return the process id of a part."""
        return self._processes[name].pid

    def descendants(self) -> list[psutil.Process]:
        """Return all processes that its parts have started, including those that wait for a job."""
        found = []
        for process in self._processes.values():
            try:
                found += psutil.Process(process.pid).children(recursive=True)
            except psutil.NoSuchProcess:
                continue
        return [child for child in found if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]

    def kill(self) -> None:
        """Kill all of it; the processes of jobs end with their worker."""
        orphans = self.descendants()
        for process in self._processes.values():
            process.kill()
        self._ended()
        psutil.wait_procs(orphans, timeout=10)
        assert not [orphan for orphan in orphans if orphan.is_running() and orphan.status() != psutil.STATUS_ZOMBIE]

    def kill_worker(self, number: int = 0) -> None:
        """Kill a worker, as if its machine died; the other processes continue."""
        name = f"worker{number}" if IS_SPLIT else "api"
        self._processes[name].kill()
        self._processes[name].wait()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Stop all of it in order; return the worst exit code."""
        for process in self._processes.values():
            process.send_signal(number)
        return self._ended()

    def close(self) -> None:
        """Kill all of it unconditionally."""
        if any(process.poll() is None for process in self._processes.values()):
            self.kill()

    def _launch(self, name: str) -> None:
        with self.log.open("ab") as log:
            command = [str(ROCKET), *self._commands[name]]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=self.environment)
        if name in self._processes:
            self._processes[name].stdout.close()
        self._processes[name] = process
        if name != "api":
            # It starts concurrently with the others; if it fails, the test's own wait shows it.
            return
        line = process.stdout.readline().decode()
        assert line.startswith("Serving on http://"), (line, self.log.read_text()[-2000:])
        self.url = line.removeprefix("Serving on ").strip()
        if hasattr(self, "client"):
            self.client.close()
        self.client = httpx2.Client(base_url=self.url, timeout=180)
        self.process = process

    def _ended(self) -> int:
        self.client.close()
        codes = []
        for process in self._processes.values():
            codes.append(process.wait(timeout=180))
            process.stdout.close()
        self._processes.clear()
        return max(codes, key=abs)
