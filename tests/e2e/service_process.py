"""The real service in a separate process, as a user starts it, with methods to kill it."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import psutil

from app.shared.confinement import supported

ROCKET = Path(sys.executable).parent / "rocket"
QUICK = {
    # Each look at the database costs a service as much time as answering a request.
    "ROCKET_POLL_SECONDS": "0.2",
    "ROCKET_RETRY_BACKOFF_SECONDS": "0.1",
    # The tests poll far more often than a person.
    "ROCKET_RATE_LIMIT": "100000/minute",
    "OMP_NUM_THREADS": "1",
    # Costs each process of a job one CPU second; `test_service` has one that measures.
    "ROCKET_MEASURE_ENERGY": "false",
    # Where bubblewrap is installed, each process of a job would import what it needs; tests/system uses it.
    "ROCKET_ISOLATION": "landlock" if supported().missing == () else "auto",
}
JOB_MODULES = frozenset({"worker.attempt.job", "worker.confined.compute", "worker.confined.fetch"})


class Service:
    """`rocket serve` on a free port.

    Args:
        data_dir: its data folder.
        settings: environment variables.
    """

    def __init__(self, data_dir: Path, **settings: str) -> None:
        self.data_dir = data_dir
        self.log = data_dir.parent / f"{data_dir.name}.log"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("ROCKET_", "HF_TOKEN"))}
        self.environment = kept | QUICK | settings
        self.start()

    def start(self) -> None:
        """Start it, and wait until it says where it listens."""
        command = [str(ROCKET), "serve", "--port", "0", "--data-dir", str(self.data_dir)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=self.environment)
        assert self.process.stdout is not None
        # This returns when the process exits, too, so that a process that does not start cannot block.
        line = self.process.stdout.readline().decode()
        assert line.startswith("Serving on http://"), (line, self.log.read_text()[-2000:])
        self.url = line.removeprefix("Serving on ").strip()
        self.client = httpx2.Client(base_url=self.url, timeout=180)

    @property
    def answering_pid(self) -> int:
        """Process id of what answers requests."""
        return self.process.pid

    def children(self) -> list[psutil.Process]:
        """Return the living processes of jobs."""
        return [child for child in self.descendants() if runs_job(child)]

    def descendants(self) -> list[psutil.Process]:
        """Return all processes that the service has started, including those that wait for a job."""
        try:
            return [child for child in psutil.Process(self.process.pid).children(recursive=True) if child.is_running()]
        except psutil.NoSuchProcess:
            return []

    def kill_job(self) -> bool:
        """Kill the process of the running job, if there is one."""
        children = self.children()
        for child in children:
            child.kill()
        return bool(children)

    def kill(self) -> None:
        """Kill the service itself, and check that its jobs' processes end too."""
        orphans = self.descendants()
        self.process.kill()
        self._ended()
        _, alive = psutil.wait_procs(orphans, timeout=30)
        assert not [described for orphan in alive if (described := _described(orphan))]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Stop it as a user would, and return its exit code."""
        self.process.send_signal(number)
        return self._ended()

    def revive(self) -> None:
        """Start it if it has died, as a restart policy does."""
        if self.process.poll() is not None:
            self._ended()
            self.start()

    def close(self) -> None:
        """Kill it unconditionally."""
        if self.process.poll() is None:
            self.kill()

    def submit(self, **request: object) -> str:
        """Submit a job and return its id."""
        answer = self.client.post("/jobs", json=request)
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    def job(self, job_id: str) -> dict:
        """Return a job."""
        return self.client.get(f"/jobs/{job_id}").raise_for_status().json()

    def wait(self, job_id: str, *, until, seconds: float = 180, look_seconds: float = 0.02) -> dict:
        """Wait until a condition on a job holds."""
        deadline = time.monotonic() + seconds
        while not until(job := self.job(job_id)):
            assert time.monotonic() < deadline, (job, self.log.read_text()[-3000:])
            time.sleep(look_seconds)
        return job

    def finished(self, job_id: str) -> dict:
        """Wait for the end of a job, which lasts; frequent polling would only take time from the job itself."""
        ended = {"succeeded", "failed", "cancelled"}
        return self.wait(job_id, until=lambda job: job["status"] in ended, look_seconds=0.1)

    def hashes(self, job_id: str) -> dict[str, str]:
        """Return the SHA-256 of a job's artifacts by name, except reports and card, which contain times."""
        data = self.client.get(f"/jobs/{job_id}/artifacts").raise_for_status().json()["data"]
        return {
            file["name"]: file["sha256"] for file in data if not file["name"].endswith(("report.json", ".html", ".md"))
        }

    def _ended(self) -> int:
        self.client.close()
        code = self.process.wait(timeout=180)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


def runs_job(process: psutil.Process) -> bool:
    """Return whether a process works for a job, and does not only wait for one."""
    return any(runs(process, module) for module in JOB_MODULES)


def runs(process: psutil.Process, module: str) -> bool:
    """Return whether a process is an interpreter that runs a module."""
    words = command_line(process)
    return ("-m", module) in itertools.pairwise(words)


def command_line(process: psutil.Process) -> list[str]:
    """Return the words of a process's command line; none if it has ended."""
    try:
        # A process that has changed its title has only one argument.
        return " ".join(process.cmdline()).split()
    except psutil.NoSuchProcess:
        return []


def _described(process: psutil.Process) -> str | None:
    """Return what a process is; None if it has ended."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return f"{process.pid} {process.status()} {process.cmdline()}"
    except psutil.NoSuchProcess:
        return None
