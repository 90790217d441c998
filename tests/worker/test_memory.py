"""Jobs that take too much memory, in real processes with real limits."""

import json
import os

import pytest

from app.shared.confinement import MemoryGroup
from rocket_core.errors import InsufficientMemoryError
from tests.sampling import sweep
from tests.worker.test_isolation import COMPUTE, JOB
from worker.memory import MemoryLimit, group_name
from worker.runner import Runner

GIB = 2**30
# Reached soon, and enough for all libraries.
CAP = 3 * GIB // 2
QUICK = {"calibration": {"samples": 2, "sequence_length": 16}, "ratio": 0.3}


@pytest.fixture
def run(configure, database, submit, look, program, model):
    """Run one attempt at a job with little memory, and return the job."""

    def run(code=None, **request):
        given = () if code is None else (program(JOB.format(program=program(COMPUTE + code)[0])),)
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


def test_an_abort_for_another_reason_is_retried(run):
    job = run("os.abort()")
    assert job.status == "queued"


def test_shared_memory_is_limited_by_the_control_group(run):
    group = MemoryGroup.try_create(f"rocket-test-{os.getpid()}", CAP)
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


def test_the_limit_follows_the_needs_of_the_run():
    limit = MemoryLimit(f"rocket-test-{os.getpid()}", cap=None)
    try:
        assert limit.raise_for(10 * GIB) == limit.base_bytes + 20 * GIB
        assert limit.base_bytes >= 4 * GIB
    finally:
        limit.remove()


def test_a_job_that_needs_more_than_the_maximum_is_refused():
    limit = MemoryLimit(f"rocket-test-{os.getpid()}", cap=CAP)
    try:
        assert limit.base_bytes == CAP
        assert limit.raise_for(CAP) == CAP
        with pytest.raises(InsufficientMemoryError, match="ROCKET_MAX_JOB_MEMORY_BYTES"):
            limit.raise_for(CAP + 1)
    finally:
        limit.remove()


def test_the_group_of_a_killed_attempt_is_removed(settings, database, program, submit):
    if (group := MemoryGroup.try_create(f"rocket-test-{os.getpid()}", CAP)) is None:
        pytest.skip("this process may not make control groups")
    group.remove()
    job_id = submit(max_attempts=1)
    left = "from app.shared.confinement import MemoryGroup\nfrom worker.memory import group_name\n"
    left += f"MemoryGroup.try_create(group_name(sys.argv[2]), {CAP})\nos.kill(os.getpid(), signal.SIGKILL)"
    fences = []

    class Noting(Runner):
        def _claim(self, wanted):
            lease = super()._claim(wanted)
            fences.append(lease.fence)
            return lease

    assert Noting(settings, database, program(left)).run(job_id)
    again = MemoryGroup.try_create(group_name(fences[0]), CAP)
    assert again is not None
    again.remove()
