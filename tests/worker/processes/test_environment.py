import os
from pathlib import Path

from worker.processes.environment import confined_environment, named_paths

GIVEN = {
    "AWS_ACCESS_KEY_ID": "canary",
    "CODECARBON_API_KEY": "canary",
    "CUDA_VISIBLE_DEVICES": "1",
    "DATABASE_URL": "canary",
    "HF_ENDPOINT": "http://hub",
    "HF_HUB_DISABLE_XET": "1",
    "HF_TOKEN": "canary",
    "HUGGING_FACE_HUB_TOKEN": "canary",
    "HOME": "/root",
    "HTTPS_PROXY": "http://user:canary@proxy",
    "LC_ALL": "C",
    "OMP_NUM_THREADS": "2",
    "OMP_PROC_BIND": "true",
    "PATH": "/bin",
    "PGPASSWORD": "canary",
    "PYTHONSTARTUP": "/root/canary.py",
    "ROCKET_SECRET_KEY": "canary",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHINDUCTOR_CACHE_DIR": "/tmp/torchinductor_root",  # noqa: S108 - not used
    "TORCH_API_TOKEN": "canary",
}
PASSED_ON = ("CUDA_VISIBLE_DEVICES", "HF_ENDPOINT", "HF_HUB_DISABLE_XET", "LC_ALL", "OMP_NUM_THREADS", "PATH")


def test_only_named_variables_and_no_secret_are_passed_on():
    environment = confined_environment(Path("/job/home"), Path("/job/tmp"), network=False, inherited=GIVEN)
    assert "canary" not in str(environment)
    assert environment["TOKENIZERS_PARALLELISM"] == "false"
    assert not {"OMP_PROC_BIND", "TORCHINDUCTOR_CACHE_DIR"} & set(environment)
    assert {name: environment[name] for name in PASSED_ON} == {name: GIVEN[name] for name in PASSED_ON}
    assert {environment["HOME"], environment["TMPDIR"]} == {"/job/home", "/job/tmp"}
    assert environment["HF_HOME"].startswith("/job/home/")


def test_proxies_are_passed_on_only_with_a_network():
    environment = confined_environment(Path("/job/home"), Path("/job/tmp"), network=True, inherited=GIVEN)
    assert environment["HTTPS_PROXY"] == GIVEN["HTTPS_PROXY"]


def test_absolute_paths_in_variables_are_readable():
    paths = os.pathsep.join(["/opt/cuda/lib", "", "relative"])
    assert named_paths({"LD_LIBRARY_PATH": paths, "SSL_CERT_FILE": "/opt/ca.pem"}) == (
        Path("/opt/cuda/lib"),
        Path("/opt/ca.pem"),
    )
