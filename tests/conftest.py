"""Fixtures of all tests: one thread for torch, real servers, and a migrated database of either kind."""

import gc
import logging
import os
import shutil
import sys
import threading
from pathlib import Path

# Variables of the caller; huggingface_hub reads some when it is imported.
for _name in [name for name in os.environ if name.startswith(("AWS_", "HF_", "PG", "ROCKET_", "TRANSFORMERS_"))]:
    del os.environ[_name]

import jaxtyping  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

from app.shared.database import upgrade  # noqa: E402
from app.shared.logging import StructuredFormatter  # noqa: E402
from tests.sampling import sweep  # noqa: E402
from tests.servers import MissingServerError, Postgres, Redis  # noqa: E402

# For `make soak`: more random examples.
settings.register_profile("soak", max_examples=1000)


# For every process that a test starts, too, unless the environment sets it: with more threads than cores, the threads
# wait for one another in busy loops that take up to four times the time of the work itself.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# In these folders, files with few tests take longest: started last, they would leave all but one core idle.
LONG = ("tests/e2e/", "tests/docs/", "tests/examples/", "tests/rocket_core/pipeline/", "tests/worker/")

# Whole runs in which the shapes of tensors are checked. Others repeat the same calls thousands of times, and would take
# half as long again; functions are checked in their own tests, and `make soak` checks its cases as well.
CHECKED = (
    "tests/rocket_core/pipeline/test_artifacts",
    "tests/rocket_core/pipeline/test_families.py",
    "tests/rocket_core/pipeline/test_quantized.py",
)

# What `make test` also leaves out: clients and their servers, processes, and searches through many random inputs.
SLOW = (
    "tests/app/api/routes/test_artifacts.py",
    "tests/app/api/test_contract.py",
    "tests/app/api/test_documented.py",
    "tests/app/api/test_hostile.py",
    "tests/app/api/test_hostile_models.py",
    "tests/app/api/test_life_cycle.py",
    "tests/app/api/test_tenant_shares.py",
    "tests/app/services/test_admission.py",
    "tests/app/services/test_judge_process.py",
    "tests/app/shared/storage/",
    "tests/app/shared/confinement/",
    "tests/app/shared/test_fork_server.py",
    "tests/app/shared/test_relay.py",
    "tests/app/test_hostile_models.py",
    "tests/app/test_web_process.py",
    "tests/requirements/",
    "tests/rocket_cli/commands/",
    "tests/rocket_cli/service/",
    "tests/rocket_cli/test_signals.py",
    "tests/rocket_client/",
    "tests/rocket_core/hf/test_families.py",
    "tests/rocket_core/hf/test_processes.py",
    "tests/rocket_core/inspection/test_hostile_files.py",
    "tests/rocket_core/inspection/test_hostile_models.py",
    "tests/rocket_core/hub/test_cache.py",
    "tests/rocket_core/inspection/checks/test_preconditions.py",
    "tests/rocket_core/models/test_pretrained.py",
)
# Fixtures that start servers or processes.
SERVERS = frozenset({"postgres", "redis_server", "s3_server"})


def pytest_collection_modifyitems(items):
    """Mark what `make test` leaves out, and put the longest files first, which are handed out in this order."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))
    for item in items:
        kind = item.callspec.params.get("database_kind") if hasattr(item, "callspec") else None
        if item.nodeid.startswith(LONG + SLOW) or kind == "postgres" or not SERVERS.isdisjoint(item.fixturenames):
            item.add_marker("slow")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Check the shapes of tensors, before any fixture, unless the test repeats what others check."""
    repeats = item.nodeid.startswith(LONG) and not item.nodeid.startswith(CHECKED)
    jaxtyping.config.update("jaxtyping_disable", repeats and item.get_closest_marker("soak") is None)


def pytest_collection_finish():
    """Exclude all modules and tests from the garbage collector's repeated scans."""
    gc.collect()
    gc.freeze()


def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        "databases(*kinds, soak=()): which of sqlite and postgres a test runs on, if not on sqlite alone",
    )


def pytest_generate_tests(metafunc):
    """Run a test once on each kind of database named by the nearest mark of it, its class or its module."""
    if "database_kind" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("databases")
        kept, others = (mark.args, mark.kwargs.get("soak", ())) if mark else (("sqlite",), ())
        metafunc.parametrize("database_kind", sweep(kept, soak=others))


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    # The models are tiny: a second thread would only spin, which costs more the fewer the cores are.
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _one_template():
    """Let all applications of this process fork from one template, as its start takes longer than most tests."""
    from app.services.admission import template_kept

    with template_kept():
        yield


@pytest.fixture(autouse=True)
def _logging_restored():
    """Undo what a command that runs within a test has done to the logging of the process."""
    root = logging.getLogger()
    level, hooks = root.level, (sys.excepthook, threading.excepthook)
    yield
    root.handlers[:] = [handler for handler in root.handlers if not isinstance(handler.formatter, StructuredFormatter)]
    root.setLevel(level)
    logging.captureWarnings(False)
    sys.excepthook, threading.excepthook = hooks


@pytest.fixture
def accelerator():
    """Return the accelerator that torch sees, for tests marked `gpu`."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        pytest.skip("needs a GPU that torch sees")
    return device


@pytest.fixture(scope="session")
def postgres():
    server = _started(Postgres)
    yield server
    server.close()


@pytest.fixture(scope="session")
def redis_server():
    server = _started(Redis)
    yield server
    server.close()


def _started(kind):
    # Never skipped, because a test that does not run proves nothing.
    try:
        return kind()
    except MissingServerError as error:
        pytest.fail(str(error))


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("template") / "rocket.sqlite3"
    upgrade(f"sqlite:///{file}")
    return file


@pytest.fixture
def copy_database(database_kind, request):
    """Create migrated databases of the kind that the test runs on, and return their URLs."""
    made = []

    def copy(file: Path):
        if database_kind == "sqlite":
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(request.getfixturevalue("migrated_file"), file)
            return f"sqlite+pysqlite:///{file}"
        server = request.getfixturevalue("postgres")
        made.append((server, server.create(server.migrated)))
        return server.url(made[-1][1])

    yield copy
    for server, name in made:
        server.drop(name)


@pytest.fixture(scope="session")
def s3_server():
    from tests.reference.s3_server import S3Server

    server = S3Server()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def bucket(s3_server, monkeypatch):
    """Yield an empty bucket, for which the AWS tools have credentials."""
    from tests.reference.s3_server import CREDENTIALS

    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    # No credentials from this machine, and no network requests.
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/nowhere")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return s3_server.make_bucket()


@pytest.fixture
def s3_settings(s3_server, bucket):
    """Return settings of a service with its artifacts in that bucket."""
    return {"storage_url": f"s3://{bucket.name}/rocket/test", "s3_endpoint_url": s3_server.url}
