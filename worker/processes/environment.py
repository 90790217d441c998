"""Environment of the processes that read untrusted files: listed variables only, without secrets."""

import os
import site
from collections.abc import Mapping
from pathlib import Path

from rocket_core.system.torch_environment import set_torch_defaults

_NAMES = frozenset(
    {
        *("DISABLE_SAFETENSORS_CONVERSION", "HF_ENDPOINT", "LANG", "LANGUAGE", "LD_LIBRARY_PATH", "PATH"),
        *("PYTHONHASHSEED", "PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONWARNINGS", "RAYON_NUM_THREADS"),
        *("REQUESTS_CA_BUNDLE", "TOKENIZERS_PARALLELISM", "TRANSFORMERS_VERBOSITY", "TZ"),
    }
)
_PREFIXES = (
    *("CODECARBON_", "CUBLAS_", "CUDA_", "GOMP_", "HF_HUB_", "HIP_", "HSA_", "KMP_", "LC_", "MALLOC_", "MKL_"),
    *("NVIDIA_", "OMP_", "OPENBLAS_", "PYTORCH_", "ROCR_", "SSL_CERT_", "TORCH"),
)
# A confined process may bind only its first thread to processors, and libgomp ends if it cannot bind the others; and it
# may not write to a cache of the operator.
_UNUSABLE = frozenset({"GOMP_CPU_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND", "TORCHINDUCTOR_CACHE_DIR"})
# A proxy's URL may hold a password, which only a process with network access needs.
_PROXIES = frozenset({"ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"})
# Words that mark a variable as a secret, as in CODECARBON_API_KEY.
_SECRET_WORDS = frozenset({"CREDENTIALS", "KEY", "PASSWORD", "SECRET", "TOKEN"})
# Variables that name files or folders that must be readable.
_PATHS = ("LD_LIBRARY_PATH", "REQUESTS_CA_BUNDLE", "SSL_CERT_DIR", "SSL_CERT_FILE")


def confined_environment(
    home: Path, temporary: Path, *, network: bool, inherited: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment of a confined process.

    Args:
        home: its home, which also holds the files of the Hub's client.
        temporary: its folder for temporary files.
        network: whether it may open sockets.
        inherited: variables to select from; None means those of this process.
    """
    given = os.environ if inherited is None else inherited
    selected = {name: value for name, value in given.items() if _is_passed_on(name, network=network)}
    set_torch_defaults(selected)
    own = {
        "HOME": str(home),
        "HF_HOME": str(home / "huggingface"),
        "HF_HUB_CACHE": str(home / "huggingface" / "hub"),
        # A token comes only with the request.
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
        "TMPDIR": str(temporary),
        **_user_packages(),
    }
    return {**selected, **own}


def named_paths(environment: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the files and folders named by an environment's variables."""
    parts = (part for name in _PATHS for part in environment.get(name, "").split(os.pathsep))
    return tuple(Path(part) for part in parts if Path(part).is_absolute())


def _user_packages() -> dict[str, str]:
    """Return variables that keep the interpreter from importing packages from the job's home."""
    return {"PYTHONUSERBASE": site.getuserbase()} if site.ENABLE_USER_SITE else {"PYTHONNOUSERSITE": "1"}


def _is_passed_on(name: str, *, network: bool) -> bool:
    if _SECRET_WORDS.intersection(name.upper().split("_")):
        return False
    if name.upper() in _PROXIES:
        return network
    return name not in _UNUSABLE and (name in _NAMES or name.startswith(_PREFIXES))
