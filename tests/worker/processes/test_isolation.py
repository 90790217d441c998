"""Isolation of a process that reads an untrusted model, tested with a hostile program inside it."""

import json
import os
import signal
import socket
import textwrap

import psutil
import pytest
from pydantic import SecretStr

from app.shared.confinement import supported
from app.shared.encryption import encrypt
from app.shared.errors import InvalidSettingsError
from app.shared.repositories import jobs
from app.shared.requests import JobRequest
from tests.reference.reports import empty_report
from tests.sampling import sweep
from tests.worker.waiting import eventually
from worker.main import Worker
from worker.processes import isolation
from worker.runner import Runner

confined = pytest.mark.skipif(supported().missing != (), reason="this system does not confine processes")

CANARY = "canary-0123456789"
KEY = "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE="
# The process of an attempt, unchanged except for the program of its compute process.
JOB = """
from worker.attempt import delegation
from worker.attempt import job
delegation.COMPUTE_PROGRAM = ({program!r},)
sys.exit(job.main())
"""
# In its place: confined in the same way and with the same request, followed by the code of a test.
COMPUTE = """
import json, socket, threading
from contextlib import suppress
from pathlib import Path
from worker.confined import compute
from worker.confined.confinement import enter_confinement

channel = compute.connect()
enter_confinement(channel)
from worker.confined.computation import receive_request
from worker.confined.messages import *
request = receive_request(channel, COMPUTE_REQUEST)
"""
CURIOUS = """
plan = {plan!r}
def tried(action):
    try:
        return "got " + repr(action())
    except OSError as error:
        return type(error).__name__
def read(path):
    path = Path(path)
    return os.listdir(path) if path.is_dir() else path.read_bytes()[:40]
def connect(kind, address):
    with socket.socket(kind, socket.SOCK_STREAM) as connection:
        connection.connect(address)
found = {{path: tried(lambda: read(path)) for path in plan["read"]}}
found |= {{"write " + path: tried(lambda: Path(path).write_bytes(b"x")) for path in plan["write"]}}
found["connect"] = tried(lambda: connect(socket.AF_INET, ("127.0.0.1", plan["port"])))
found["connect to a file"] = tried(lambda: connect(socket.AF_UNIX, plan["socket"]))
for name, pid in (("attempt", os.getppid()), ("worker", plan["worker"])):
    found["environment of " + name] = tried(lambda: Path("/proc", str(pid), "environ").read_bytes()[:40])
    found["memory of " + name] = tried(lambda: os.open(Path("/proc", str(pid), "mem"), os.O_RDWR))
    found["signal to " + name] = tried(lambda: os.kill(pid, 0))
(request.output / "found.json").write_text(json.dumps(
    [found, dict(os.environ), sys.argv, read(Path(request.model) / "config.json").decode(), os.getcwd()]
))
channel.send(Finished())
"""


@pytest.fixture
def run(settings, database, program, submit, look, model):
    """Run one attempt at a job whose compute process runs the code of a test."""

    def run(code, changed=None, *, outer="", **request):
        computing = program(
            COMPUTE.replace("enter_confinement(", textwrap.dedent(outer) + "enter_confinement(", 1)
            + textwrap.dedent(code)
        )
        job_id = submit(**request)
        assert Runner(changed or settings, database, program(JOB.format(program=computing[0]))).run()
        return look(job_id)

    return run


def report_with(folder):
    """Return a report of one artifact, in a folder."""
    exports = [{"kind": "dense", "folder": folder, "stored_bytes": 1}]
    return json.dumps(json.loads(empty_report().model_dump_json()) | {"exports": exports})


def left_in(settings, name):
    """Return what a process left in the output folder of its job."""
    [file] = (settings.data_dir / "work").glob(f"*/out/{name}")
    return file.read_text()


@pytest.fixture
def secrets(tmp_path, monkeypatch, settings):
    """Return places that contain secrets, and variables that are secrets."""
    home = tmp_path / "operator"
    files = [
        home / ".aws" / "credentials",
        home / ".cache" / "huggingface" / "token",
        home / ".ssh" / "id_ed25519",
        settings.data_dir / "secret.key",
        settings.data_dir / "artifacts" / ("0" * 32),
        settings.data_dir / "work" / ("0" * 32) / "out" / "weights",
        settings.models_folder / "private" / "config.json",
    ]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(CANARY)
    variables = ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "CODECARBON_API_KEY", "HTTPS_PROXY", "MY_SECRET")
    for name in variables:
        monkeypatch.setenv(name, CANARY)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return [*map(str, files), str(settings.data_dir), str(settings.data_dir / "work")]


@confined
def test_a_hostile_model_reaches_no_file_network_or_process(run, secrets, settings, configure, database_kind, tmp_path):
    database = str(settings.database.database) if database_kind == "sqlite" else "/etc/shadow"
    listener = socket.create_server(("127.0.0.1", 0))
    local = socket.socket(socket.AF_UNIX)
    local.bind(str(tmp_path / "s"))
    local.listen()
    plan = {
        "read": [*secrets, database, "/etc/shadow", "/root", str(tmp_path)],
        "write": [*secrets[:7], database, str(settings.models_folder / "tiny" / "config.json"), str(tmp_path / "new")],
        "port": listener.getsockname()[1],
        "socket": str(tmp_path / "s"),
        "worker": os.getpid(),
    }
    with listener, local:
        job = run(CURIOUS.format(plan=plan), configure(secret_key=KEY, hf_token=CANARY))
    found, environment, arguments, config, folder = json.loads(left_in(settings, "found.json"))
    # The model is readable, which shows that the attempts themselves work.
    assert "architectures" in config
    assert {name: answer for name, answer in found.items() if answer.startswith("got")} == {}
    assert set(found.values()) == {"PermissionError"}
    assert CANARY not in str((environment, arguments))
    assert KEY not in str((environment, arguments))
    assert not [name for name in environment if name.startswith(("ROCKET_", "AWS_", "PG", "HF_TOKEN"))]
    assert environment["OMP_NUM_THREADS"] == "1"
    for name in ("HOME", "HF_HOME", "TMPDIR"):
        assert environment[name].startswith(str(settings.data_dir / "work")), name
    assert folder.endswith("empty")
    # It reported that it finished, without a report file.
    assert (job.status, job.error["code"]) == ("failed", "storage_error")


FETCH = """
import json, socket
from pathlib import Path
from worker.confined import compute
from worker.confined.confinement import enter_confinement

channel = compute.connect()
enter_confinement(channel)
from worker.confined.messages import *
request = channel.receive(FETCH_REQUEST)
def tried(action):
    try:
        return "got " + repr(action())
    except OSError as error:
        return type(error).__name__
found = {{path: tried(lambda: list(Path(path).iterdir()) if Path(path).is_dir() else Path(path).read_bytes())
         for path in {read!r}}}
with socket.create_connection(("127.0.0.1", {port})):
    pass
(request.cache / "found.json").write_text(json.dumps([found, dict(os.environ), request.token]))
channel.send(Failed(code="hub_unavailable", message="later"))
time.sleep(600)
"""


@confined
def test_a_download_has_a_network_and_only_one_token(database, program, secrets, look, configure):
    token = "hf_of_the_job"  # noqa: S105 - no real one
    settings = configure(secret_key=KEY, hf_token=CANARY)
    request = JobRequest(model_id="org/model", ratio=0.3)
    with database.transaction() as session:
        encrypted = encrypt(settings, SecretStr(token))
        job_id = jobs.create_job(session, request, max_attempts=2, hub_token=encrypted).job.id
    with socket.create_server(("127.0.0.1", 0)) as listener:
        fetching = program(FETCH.format(read=secrets, port=listener.getsockname()[1]))
        job = JOB.replace("COMPUTE_PROGRAM", "FETCH_PROGRAM").format(program=fetching[0])
        assert Runner(settings, database, program(job)).run()
    assert (look(job_id).status, look(job_id).attempt) == ("queued", 1)
    [file] = (settings.data_dir / "work").glob("*/hub/found.json")
    found, environment, given = json.loads(file.read_text())
    assert set(found.values()) == {"PermissionError"}
    assert given == token
    # A download needs the proxy, including its password.
    del environment["HTTPS_PROXY"]
    assert CANARY not in str(environment)
    assert KEY not in str(environment)


@confined
@pytest.mark.parametrize("place", sweep(["report.json", "dense/LICENSE"], soak=["report.html", "dense"]))
def test_a_link_in_place_of_a_file_fails_the_job(run, secrets, place, stored, tmp_path):
    before = stored()
    code = f"""
    (request.output / "dense").mkdir()
    (request.output / "report.html").write_text("page")
    (request.output / "report.json").write_text({report_with("dense")!r})
    place = request.output / {place!r}
    if place.is_dir():
        place.rmdir()
    place.unlink(missing_ok=True)
    place.symlink_to({secrets[0]!r})
    channel.send(Finished())
    """
    job = run(code)
    assert (job.status, job.error["code"], job.attempt) == ("failed", "storage_error", 1)
    assert str(tmp_path) not in job.error["message"]
    assert stored() == before


@pytest.mark.parametrize("folder", sweep([".."], soak=["../../..", "/", "rocket"]))
def test_a_report_that_names_another_folder_fails_the_job(run, secrets, folder, stored):
    before = stored()
    code = f"""
    (request.output / "report.json").write_text({report_with(folder)!r})
    (request.output / "report.html").write_text("page")
    channel.send(Finished())
    """
    job = run(code)
    assert (job.status, job.error["code"]) == ("failed", "storage_error")
    assert stored() == before


@pytest.mark.parametrize(
    ("code", "expected"),
    sweep(
        [
            ('channel._connection.sendall(b"{}\\n")', "internal_error"),
            ('channel.send(Failed(code="ours", message="see http://elsewhere"))', "internal_error"),
            ("channel.send(CANCELLED)", "worker_lost"),
            ('channel.send(Failed(code="corrupt_checkpoint", message="x"))', "corrupt_checkpoint"),
        ],
        soak=[
            ('channel._connection.sendall(b"[" * 100000 + b"\\n")', "internal_error"),
            ('channel._connection.sendall(b"\\xff\\n")', "internal_error"),
            ('channel.send(Failed(code="fenced_out", message="x"))', "internal_error"),
            (
                'channel.send(Advanced(stage="exporting", layer=None, fraction=0.5, seconds_left=None))\n'
                'channel.send(Advanced(stage="preflight", layer=None, fraction=0.5, seconds_left=None))',
                "internal_error",
            ),
            (
                'channel._connection.sendall(b\'{"kind":"advanced","stage":"exporting","layer":"a\\\\u0000",\''
                'b\'"fraction":0.5,"seconds_left":null}\\n\')',
                "internal_error",
            ),
        ],
    ),
)
def test_messages_from_a_process_are_validated(run, code, expected):
    job = run(code + "\ntime.sleep(600)", max_attempts=1)
    assert (job.status, job.error["code"]) == ("failed", expected)
    assert "elsewhere" not in job.error["message"]


def test_an_endless_line_is_not_read_to_the_end(run):
    code = """
    try:
        while True:
            channel._connection.sendall(bytes(2**20).replace(b"\\0", b" "))
    except OSError:
        time.sleep(600)
    """
    job = run(code)
    assert (job.status, job.error["code"]) == ("failed", "internal_error")


def test_hidden_descendants_end_with_their_process(run, settings):
    code = """
    hidden = request.output / "hidden"
    if os.fork() == 0:
        with suppress(PermissionError):
            os.setsid()
        if os.fork() == 0:
            (request.output / "part").write_text(str(os.getpid()))
            (request.output / "part").rename(hidden)
            time.sleep(600)
        os._exit(0)
    while not hidden.exists():
        time.sleep(0.01)
    channel.send(Finished())
    """
    job = run(code)
    assert job.status == "failed"
    assert not psutil.pid_exists(int(left_in(settings, "hidden")))


@confined
def test_its_processes_end_with_the_attempt(settings, database, program, submit, look, model, in_background):
    code = (
        COMPUTE
        + '(request.output / "pid").write_text(str(os.getpid()))\n'
        + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)"
    )
    computing = program(code)
    submit(max_attempts=1)
    runner = Runner(settings, database, program(JOB.format(program=computing[0])))
    thread = in_background(runner.run)
    [file] = eventually(lambda: [f for f in (settings.data_dir / "work").glob("*/out/pid") if f.read_text()])
    process = psutil.Process(int(file.read_text()))
    process.parent().send_signal(signal.SIGKILL)
    thread.join()
    eventually(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize(("number", "words"), [("SIGKILL", "memory"), ("SIGSEGV", "Segmentation")])
def test_a_killed_process_uses_an_attempt(run, number, words):
    job = run(f"os.kill(os.getpid(), signal.{number})", max_attempts=2)
    assert (job.status, job.attempt) == ("queued", 1)


def test_a_process_that_used_up_its_time_is_not_retried(run):
    job = run("os.kill(os.getpid(), signal.SIGPROF)", max_attempts=2)
    assert (job.status, job.error["code"]) == ("failed", "checkpoint_format")
    assert "tokenizer" in job.error["message"]


def test_a_cancelled_process_that_keeps_nothing_is_killed(
    configure, database, program, submit, look, model, cancel, in_background
):
    code = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel.send(Advanced(stage="preflight", layer=None, fraction=0.1, seconds_left=None))
    (request.output / "hangs").touch()
    time.sleep(600)
    """
    changed = configure(cancel_grace_seconds=600)
    computing = program(COMPUTE + textwrap.dedent(code))
    job_id = submit(max_attempts=1)
    thread = in_background(Runner(changed, database, program(JOB.format(program=computing[0]))).run)
    eventually(lambda: [*(changed.data_dir / "work").glob("*/out/hangs")])
    cancel(job_id)
    thread.join(60)
    assert look(job_id).status == "cancelled"


@pytest.mark.parametrize(("part", "word"), [("files", "files"), ("calls", "system calls")])
def test_required_isolation_refuses_an_incapable_system(configure, monkeypatch, caplog, part, word):
    from dataclasses import replace

    lacking = replace(supported(), **{part: False})
    monkeypatch.setattr(isolation, "supported", lambda: lacking)
    for setting in ("required", "landlock"):
        refusing = Worker(configure(isolation=setting))
        with pytest.raises(InvalidSettingsError, match=f"restrict {word}"):
            refusing.start()
        refusing._database.close()
    isolation.check_isolation(configure(isolation="auto"))
    assert f"cannot restrict {word}" in caplog.text


@confined
def test_a_model_file_that_may_not_be_read_is_named(settings, database, program, submit, look, model):
    # Root reads all files, unless it loses that privilege as well.
    unprivileged = """
    from app.shared.confinement import kernel
    kernel._KEPT_CAPABILITIES = 0
    from worker.confined import compute
    compute.main()
    """
    (model / "model.safetensors").chmod(0)
    job_id = submit(max_attempts=1)
    assert Runner(settings, database, program(JOB.format(program=program(unprivileged)[0]))).run()
    error = look(job_id).error
    assert error["code"] == "model_not_found"
    assert "local/tiny/model.safetensors" in error["message"]
    assert "chmod" in error["message"]


# A filter that refuses further ones, as that of a container may.
REFUSING_FILTERS = """
import struct
from app.shared.confinement import kernel
kernel.give_up_privileges()
steps = (0x20, 0, 0, 0, 0x15, 0, 1, 317, 0x06, 0, 0, 0x00050001, 0x06, 0, 0, 0x7FFF0000)
kernel.filter_calls(317, struct.pack("=" + "HBBI" * 4, *steps))
"""


@confined
@pytest.mark.parametrize(("setting", "code"), [("required", "internal_error"), ("auto", "corrupt_checkpoint")])
def test_a_network_that_stays_open_ends_a_run_if_required(
    configure, database, program, submit, look, model, monkeypatch, setting, code
):
    # The programs of tests do not exist in bubblewrap.
    monkeypatch.setattr(isolation, "bubblewrap_fault", lambda: "bwrap is not installed")
    going_offline = f"""
from worker.confined import compute
from worker.confined import computation
class Offline(computation.Computation):
    def _work(self):
        exec({REFUSING_FILTERS!r})
        self._observer().on_offline()
        from rocket_core.errors import CorruptCheckpointError
        raise CorruptCheckpointError("the network is open")
computation.Computation = Offline
compute.main()
"""
    computing = program(going_offline)
    job_id = submit(max_attempts=1, calibration={"dataset": "wikitext2"})
    assert Runner(configure(isolation=setting), database, program(JOB.format(program=computing[0]))).run()
    assert look(job_id).error["code"] == code


def test_a_process_that_is_not_confined_as_required_ends(run, configure, monkeypatch):
    # The programs of tests do not exist in bubblewrap.
    monkeypatch.setattr(isolation, "bubblewrap_fault", lambda: "bwrap is not installed")
    code = 'channel.send(Failed(code="corrupt_checkpoint", message="not confined"))'
    job = run(code, configure(isolation="required"), outer=REFUSING_FILTERS, max_attempts=1)
    assert (job.status, job.error["code"]) == ("failed", "worker_lost")
    job = run(code, configure(isolation="auto"), outer=REFUSING_FILTERS, max_attempts=1)
    assert (job.status, job.error["code"]) == ("failed", "corrupt_checkpoint")


def test_a_mechanism_that_does_not_work_here_is_refused(configure, monkeypatch):
    monkeypatch.setattr(isolation, "bubblewrap_fault", lambda: "bwrap is not installed")
    monkeypatch.setattr(isolation, "may_change_user", lambda: False)
    for setting, words in (("bubblewrap", "bwrap is not installed"), ("container", "as another user")):
        refusing = Worker(configure(isolation=setting))
        with pytest.raises(InvalidSettingsError, match=words):
            refusing.start()
        refusing._database.close()
    assert isolation.choose_mechanism("auto") == "landlock"
    monkeypatch.setattr(isolation, "bubblewrap_fault", lambda: None)
    assert isolation.choose_mechanism("auto") == isolation.choose_mechanism("required") == "bubblewrap"
