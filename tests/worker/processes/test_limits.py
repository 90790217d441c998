"""Jobs that take too much memory, disk or processes, in real processes with real limits."""

import json
import os
import resource
import sys

import psutil
import pytest

from app.shared.confinement import MemoryGroup
from rocket_core.errors import InsufficientMemoryError
from rocket_core.system.machine import machine_memory
from tests.sampling import sweep
from tests.worker.processes.test_isolation import COMPUTE, JOB
from worker.processes.limits import ProcessLimits, group_name
from worker.runner import Runner

settable = pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="limits of other processes cannot be set here")

GIB = 2**30
# Reached soon, and enough for all libraries.
CAP = 3 * GIB // 2
QUICK = {"calibration": {"samples": 2, "sequence_length": 16}, "ratio": 0.3}


@pytest.fixture
def run(configure, database, submit, look, program, model):
    """Run one attempt at a job with little memory, and return the job."""

    def run(code=None, *, first="", **request):
        given = () if code is None else (program(first + JOB.format(program=program(COMPUTE + code)[0])),)
        job_id = submit(**QUICK, **request)
        assert Runner(configure(max_job_memory_bytes=CAP), database, *given).run()
        return look(job_id)

    return run


def assert_out_of_memory(job):
    assert (job.status, job.error["code"], job.error["retryable"]) == ("failed", "insufficient_memory", False), (
        job.error
    )
    assert job.attempt == 1


def assert_refused(job, code):
    assert (job.status, job.error["code"], job.error["retryable"]) == ("failed", code, False), job.error
    assert job.attempt == 1


# Before they allocate any memory; both once used all of it.
@pytest.mark.soak
def test_a_model_with_a_billion_layers_fails_for_good(run, model):
    config = json.loads((model / "config.json").read_text())
    config.pop("layer_types", None)
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9}))
    assert_refused(run(), "unsupported_architecture")


def test_a_tokenizer_that_multiplies_text_fails_for_good(run, model):
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    steps = [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}] * 4
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": steps}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert_refused(run(), "checkpoint_format")


@pytest.mark.parametrize(
    "code",
    sweep(
        [
            "bytearray(2**40)",
            # As Rust terminates a process.
            'print("memory allocation of 8589934592 bytes failed", flush=True)\nos.abort()',
        ],
        soak=[
            "import torch\ntorch.empty(2**40)",
            # As C++ does.
            "print(\"terminate called after throwing an instance of 'std::bad_alloc'\", flush=True)\nos.abort()",
        ],
    ),
    ids=["python", "Rust", "torch", "C++"],
)
def test_a_process_out_of_memory_fails_its_job_for_good(run, code):
    assert_out_of_memory(run(code))


@settable
def test_a_process_without_any_memory_left_fails_for_good(run):
    code = """
from worker.confined.computation import Computation

class Greedy(Computation):
    def _compress(self):
        held = None
        for size in (2**24, 2**16, 2**8, 1):
            try:
                while True:
                    held = held, bytearray(size)
            except MemoryError:
                continue
        raise MemoryError(held)

Greedy(channel, request, should_cancel=lambda: False, close_network=lambda: None).run()
"""
    assert_out_of_memory(run(code))


def test_an_abort_for_another_reason_is_retried(run):
    job = run("os.abort()")
    assert job.status == "queued"


def test_shared_memory_is_limited_by_the_control_group(run):
    group = MemoryGroup.try_create(f"rocket-test-{os.getpid()}", CAP, processes=64)
    if group is None:
        pytest.skip("this process may not make control groups")
    group.remove()
    code = """
import mmap
with mmap.mmap(-1, 4 * 2**30) as shared:
    for start in range(0, len(shared), 2**20):
        shared[start : start + 2**20] = b"x" * 2**20
"""
    assert_out_of_memory(run(code))


@pytest.fixture
def waiting():
    """A process that waits, and whose limits can be read."""
    process = psutil.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def limit(tmp_path):
    limits = []

    def limit(**options):
        limits.append(ProcessLimits(f"rocket-test-{os.getpid()}", [tmp_path], **options))
        return limits[-1]

    yield limit
    for one in limits:
        one.remove()


def data_limits(process):
    return process.rlimit(psutil.RLIMIT_DATA)


@settable
def test_the_limit_follows_the_needs_of_the_run(limit, waiting):
    memory = limit(cap=None)
    memory.add(waiting.pid, is_raised=True)
    base, highest = data_limits(waiting)
    assert 4 * GIB <= base < highest == base + machine_memory()
    memory.raise_for(GIB)
    assert data_limits(waiting) == (base + 2 * GIB, base + 2 * GIB)


@settable
def test_no_need_lifts_the_limit_above_the_machines_memory(limit, waiting):
    memory = limit(cap=None)
    memory.add(waiting.pid, is_raised=True)
    base, highest = data_limits(waiting)
    memory.raise_for(2**61)
    assert data_limits(waiting) == (highest, highest) == (base + machine_memory(), base + machine_memory())


@settable
def test_a_process_that_only_transfers_cannot_raise_its_limit(limit, waiting):
    limit(cap=CAP).add(waiting.pid, is_raised=False)
    assert data_limits(waiting) == (CAP, CAP)


def test_a_group_is_never_allowed_more_than_the_machine_has(limit):
    memory = limit(cap=None)
    if memory._group is None:
        pytest.skip("this process may not make control groups")
    memory.raise_for(2**61)
    allowed = memory._group._folder / memory._group._names.limit
    assert int(allowed.read_text()) <= machine_memory()


@settable
def test_a_job_that_needs_more_than_the_maximum_is_refused(limit, waiting):
    memory = limit(cap=CAP)
    memory.add(waiting.pid, is_raised=True)
    assert data_limits(waiting) == (CAP, CAP)
    memory.raise_for(CAP)
    assert data_limits(waiting) == (CAP, CAP)
    with pytest.raises(InsufficientMemoryError, match="ROCKET_MAX_JOB_MEMORY_BYTES"):
        memory.raise_for(CAP + 1)


@pytest.mark.parametrize(
    "first",
    ["Required(memory_bytes=2**30)", 'Advanced(stage="calibrating", layer=None, fraction=0.1, seconds_left=None)'],
)
def test_requirements_are_accepted_once_before_the_work(run, first):
    # The second one is answered only where it is believed.
    code = f"""
channel.send({first})
if type({first}) is Required:
    channel.receive(ACKNOWLEDGED)
channel.send(Required(memory_bytes=2**30))
channel.receive(ACKNOWLEDGED)
channel.send(Failed(code="corrupt_checkpoint", message="believed"))
"""
    assert_refused(run(code), "internal_error")


@settable
def test_a_process_cannot_lift_its_own_limit(run, settings):
    code = """
import resource
channel.send(Required(memory_bytes=2**28))
channel.receive(ACKNOWLEDGED)
soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
for limits in ((hard + 1, hard + 1), (resource.RLIM_INFINITY, resource.RLIM_INFINITY)):
    try:
        resource.setrlimit(resource.RLIMIT_DATA, limits)
    except (OSError, ValueError):
        continue
    channel.send(Failed(code="corrupt_checkpoint", message="lifted"))
try:
    bytearray(hard)
except MemoryError:
    channel.send(Failed(code="insufficient_memory", message=f"{soft} {hard}"))
"""
    job = run(code)
    assert_refused(job, "insufficient_memory")
    assert job.error["message"] == f"{CAP} {CAP}"


def test_a_job_cannot_write_a_file_larger_than_the_disk(run):
    code = """
import errno, shutil
spare = shutil.disk_usage(request.output).free
with (request.output / "large").open("wb") as file:
    try:
        file.truncate(2 * spare)
    except OSError as error:
        channel.send(Failed(code="corrupt_checkpoint", message=errno.errorcode[error.errno]))
"""
    job = run(code)
    assert_refused(job, "corrupt_checkpoint")
    assert job.error["message"] == "EFBIG"


def test_a_job_ends_when_it_has_nearly_filled_the_disk(run):
    # The whole disk counts as reserved.
    code = "from worker.processes import limits\nlimits._RESERVED_SHARE, limits._RESERVED_BYTES = 1.0, 2**60\n"
    job = run("time.sleep(600)", first=code)
    assert_refused(job, "disk_full")


def test_a_job_cannot_start_processes_without_end(run):
    code = """
started = []
try:
    for number in range(2000):
        pid = os.fork()
        if pid == 0:
            signal.pause()
        started.append(pid)
except OSError as error:
    channel.send(Failed(code="corrupt_checkpoint", message=f"{type(error).__name__} {len(started)}"))
"""
    job = run(code, first="from worker.processes import limits\nlimits._THREADS = 64\n")
    assert_refused(job, "corrupt_checkpoint")
    kind, count = job.error["message"].split()
    assert kind == "BlockingIOError"
    assert int(count) < 200


def test_the_group_of_a_killed_attempt_is_removed(settings, database, program, submit):
    if (group := MemoryGroup.try_create(f"rocket-test-{os.getpid()}", CAP, processes=64)) is None:
        pytest.skip("this process may not make control groups")
    group.remove()
    job_id = submit(max_attempts=1)
    left = "from app.shared.confinement import MemoryGroup\nfrom worker.processes.limits import group_name\n"
    left += (
        f"MemoryGroup.try_create(group_name(sys.argv[2]), {CAP}, processes=64)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    fences = []

    class Noting(Runner):
        def _claim(self, wanted):
            lease = super()._claim(wanted)
            fences.append(lease.fence)
            return lease

    assert Noting(settings, database, program(left)).run(job_id)
    again = MemoryGroup.try_create(group_name(fences[0]), CAP, processes=64)
    assert again is not None
    again.remove()
