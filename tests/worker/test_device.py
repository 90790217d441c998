import os
import subprocess
import sys
import time

import pytest

from app.shared.errors import InvalidSettingsError
from worker.device import DeviceProof, prove_device


def prove(queue, program=("-m", "worker.device"), **options):
    return prove_device(queue, should_stop=lambda: False, program=program, **options)


# Stands in for torch: `usable` devices compute, others have a fault.
ANSWERS = """
from worker.device import DeviceProof
usable = {usable!r}
fault = None if sys.argv[1] in usable else "it is broken"
print("a driver that talks")
print(DeviceProof(kind=sys.argv[1], name="X1", fault=fault).model_dump_json())
"""


def test_the_cpu_can_compute_while_gpus_are_hidden():
    proof = prove("cpu")
    assert (proof.kind, proof.fault) == ("cpu", None)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "worker.device", "cuda"]
    told = subprocess.run(command, env=environment, capture_output=True, check=True).stdout
    assert DeviceProof.model_validate_json(told).fault


@pytest.mark.parametrize(
    ("queue", "usable", "kind"),
    [
        (None, ["cuda", "cpu"], "cuda"),
        (None, ["cpu"], "cpu"),
        ("gpu", ["cuda"], "cuda"),
        ("cpu", ["cuda", "cpu"], "cpu"),
    ],
)
def test_the_device_is_chosen_by_queue_and_availability(program, queue, usable, kind):
    proof = prove(queue, program(ANSWERS.format(usable=usable)))
    assert (proof.kind, proof.name, proof.fault) == (kind, "X1", None)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (ANSWERS.format(usable=["cpu"]), "it is broken"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "exit code -11"),
        ("print('nonsense')", "exit code 0"),
        ("time.sleep(600)", "0.5 seconds"),
    ],
)
def test_a_gpu_worker_without_a_working_gpu_says_why(program, code, reason):
    with pytest.raises(InvalidSettingsError, match=reason):
        prove("gpu", program(code), seconds=30 if "600" not in code else 0.5)


def test_a_stop_does_not_wait_for_a_hanging_driver(program):
    began = time.monotonic()
    stop_at = began + 0.3
    hung = program("time.sleep(600)")
    assert prove_device("gpu", should_stop=lambda: time.monotonic() > stop_at, program=hung) is None
    assert time.monotonic() - began < 10


def test_a_worker_never_imports_torch():
    code = "import sys, worker.main, worker.device, rocket_cli.service.worker; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
