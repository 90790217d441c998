"""A migrated database per test, fast settings, and small programs that stand in for a job's process."""

import hashlib
import os
import textwrap
import threading
from pathlib import Path

import psutil
import pytest

import worker
from app.shared.confinement import supported
from app.shared.database import Database
from app.shared.repositories import events, jobs, leases, outputs
from app.shared.requests import JobRequest
from app.shared.settings import Settings
from tests.servers import RUNNING

ROOT = Path(worker.__file__).parents[1]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith("ROCKET_") or name == "HF_TOKEN":
            monkeypatch.delenv(name)
    # A job's process imports the code under test, wherever the tests are started.
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture(autouse=True)
def _all_ended():
    threads = set(threading.enumerate())
    before = {child.pid for child in psutil.Process().children()}
    yield
    mine = [child for child in psutil.Process().children() if child.pid not in RUNNING | before]
    families = [process for child in mine for process in (child, *child.children(recursive=True))]
    # A process that is just ending does not count.
    _ended, left = psutil.wait_procs(families, timeout=2)
    for process in left:
        process.kill()
        process.wait()
    assert left == []
    # Progress bars of other libraries have one for the whole process.
    started = [thread for thread in set(threading.enumerate()) - threads if thread.name != "tqdm_monitor"]
    for thread in started:
        thread.join(timeout=2)  # such as those of a test's server, which may just be answering
    assert [thread.name for thread in started if thread.is_alive()] == []


@pytest.fixture
def configure(tmp_path, copy_database, database_kind):
    """Return settings of a service with its own data folder and, unless overridden, short intervals."""
    urls = {}

    def configure(**changes):
        hurry = {"poll_seconds": 0.05, "retry_backoff_seconds": 0, "cancel_grace_seconds": 20, "measure_energy": False}
        # With bubblewrap, where it is installed, programs of tests would not exist.
        hurry["isolation"] = "landlock" if supported().missing == () else "auto"
        data_dir = changes.pop("data_dir", tmp_path / "data")
        if data_dir not in urls:
            data_dir.mkdir(parents=True, exist_ok=True)
            urls[data_dir] = copy_database(data_dir / "rocket.sqlite3")
        # The file is at its default location.
        chosen = {} if database_kind == "sqlite" else {"database_url": urls[data_dir]}
        return Settings(**{"data_dir": data_dir, **chosen, **hurry, **changes})

    return configure


@pytest.fixture
def settings(configure):
    return configure()


@pytest.fixture
def database(settings):
    database = Database(settings.database)
    yield database
    database.close()


@pytest.fixture
def submit(database):
    def submit(*, max_attempts=5, **request):
        wanted = JobRequest(**{"model_id": "local/tiny", "ratio": 0.3, **request})
        with database.transaction() as session:
            return jobs.create_job(session, wanted, max_attempts=max_attempts).job.id

    return submit


@pytest.fixture
def look(database):
    """Return a job as it is now."""

    def look(job_id):
        with database.snapshot() as session:
            return jobs.get_job(session, job_id)

    return look


@pytest.fixture
def claim(database):
    def claim(job_id, *, lease_seconds=60.0):
        with database.transaction() as session:
            return leases.claim_job(session, job_id, worker="test", lease_seconds=lease_seconds)

    return claim


@pytest.fixture
def cancel(database):
    def cancel(job_id):
        with database.transaction() as session:
            jobs.cancel_job(session, job_id)

    return cancel


@pytest.fixture
def program(tmp_path):
    """Write a program that runs instead of the job; it finds the job's id, the fence and the parent in `sys.argv`."""

    def program(code):
        file = tmp_path / f"program{len(list(tmp_path.glob('program*')))}.py"
        file.write_text("import os, signal, sys, time\n" + textwrap.dedent(code))
        return (str(file),)

    return program


@pytest.fixture
def diary(tmp_path):
    """Return a file that programs write to: `note` is the code that adds a line, `read` returns all lines."""
    file = tmp_path / "diary"
    file.touch()

    class Diary:
        def note(self, expression):
            # One write at the end of the file, so that lines of several processes do not mix.
            return (
                f"os.write(os.open({str(file)!r}, os.O_WRONLY | os.O_APPEND), (str({expression}) + chr(10)).encode())"
            )

        def read(self):
            return file.read_text().splitlines()

    return Diary()


class Outage:
    """A database that can be made unavailable, as when its disk is unmounted, and available again."""

    def __init__(self, settings, shelter):
        self._file = Path(settings.database.database)
        self._shelter = shelter

    def begin(self, *databases):
        # It cannot be opened or created, and takes the place of the file in one step: a file that a connection created
        # in between would be taken for the database, and the rest of the journal next to it would be discarded.
        dead_link = self._shelter.with_suffix(".dead")
        dead_link.symlink_to(self._file.parent / "unmounted" / self._file.name)
        self._shelter.hardlink_to(self._file)
        dead_link.replace(self._file)
        for database in databases:
            # Open connections would continue to use the moved file.
            database.close()

    def end(self):
        self._shelter.rename(self._file)


@pytest.fixture
def outage(settings, tmp_path):
    return Outage(settings, tmp_path / "shelter.sqlite3")


@pytest.fixture
def model(settings):
    """Return the folder of `local/tiny`."""
    from tests.reference.tiny_models import save_tiny_model

    return save_tiny_model("llama", settings.models_folder / "tiny")


@pytest.fixture
def messages(database):
    def messages(job_id):
        with database.snapshot() as session:
            return [event.message for event in events.list_events(session, job_id, limit=1000)]

    return messages


@pytest.fixture
def published(database, settings, look):
    """Return the files of a job by name, after checking each."""

    def published(job_id):
        files = {}
        with database.snapshot() as session:
            for row in outputs.list_artifacts(session, look(job_id)):
                content = (settings.data_dir / "artifacts" / row.storage_key).read_bytes()
                assert (row.size, row.sha256) == (len(content), hashlib.sha256(content).hexdigest()), row.name
                files[row.name] = content
        return files

    return published


@pytest.fixture
def stored(settings):
    return lambda: sorted(path.name for path in (settings.data_dir / "artifacts").iterdir())


@pytest.fixture
def work(settings):
    return settings.data_dir / "work"


@pytest.fixture
def retry(database):
    def retry(job_id):
        with database.transaction() as session:
            return jobs.retry_job(session, job_id, max_attempts=5).job.id

    return retry


class Background(threading.Thread):
    """A thread that must end soon, and that a failing test does not wait for."""

    def __init__(self, action):
        super().__init__(target=action, daemon=True)
        self.start()

    def join(self, timeout=180):
        super().join(timeout)
        assert not self.is_alive(), "it has not ended"


@pytest.fixture
def in_background():
    """Call functions in threads, which must end before the test does."""
    threads = []

    def in_background(action):
        threads.append(Background(action))
        return threads[-1]

    yield in_background
    for thread in threads:
        thread.join()
