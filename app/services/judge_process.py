"""The process that reads a model's files for one request: sandboxed, limited, killed on timeout.

It is forked from a template that holds no secrets, reads its question from a socket, drops the access that the
question does not need, and writes its answer.
"""

import os
import resource
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import constants

from app.services.judgement import judge
from app.services.questions import MAX_QUESTION_BYTES, NOT_CONFINED, Answer, HubQuestion, Question, Refusal
from app.shared.confinement import Sandbox, enter_sandbox, limit_memory
from app.shared.errors import AppError
from app.shared.requests import LOCAL
from rocket_core.errors import RocketError, UnsupportedArchitectureError

# The largest accepted headers take about a third of it.
MEMORY_BYTES = 2**30
# CPU seconds; less than the timeout, most of which a question to the Hub spends waiting.
CPU_SECONDS = 9

# Leaves the processor to the service, which serves other requests meanwhile.
_NICENESS = 5
_ROOT = Path(__file__).parents[2]


def run(descriptors: Sequence[int]) -> None:
    """Answer one question.

    Args:
        descriptors: one socket, from which the question is read to its end.
    """
    with socket.socket(fileno=descriptors[0]) as channel:
        try:
            question = Question.model_validate_json(_receive(channel))
            _confine(question)
            _print_nowhere()
        except Exception:  # noqa: BLE001  # told apart from all that the files can cause
            traceback.print_exc()
            sys.exit(NOT_CONFINED)
        channel.sendall(_answer(question).model_dump_json().encode())


def _receive(channel: socket.socket) -> bytes:
    with channel.makefile("rb") as stream:
        return stream.read(MAX_QUESTION_BYTES)


def _confine(question: Question) -> None:
    # At the second one it is killed, even if it ignores the signal of the first.
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit_memory(_data_bytes() + MEMORY_BYTES)
    if question.hub is not None:
        _prepare_for_hub(question.hub)
        sandbox = Sandbox(readable=(*_certificates(), *_images_of(question)), network=True)
    else:
        assert question.folder is not None
        sandbox = Sandbox(readable=(*_files_of(Path(question.folder)), *_images_of(question)))
    enter_sandbox(sandbox, required=question.requires_isolation)
    os.nice(_NICENESS)


def _print_nowhere() -> None:
    """Discard what this process prints from now on, which would be raw lines in the service's log."""
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stderr.fileno())


def _data_bytes() -> int:
    """Return the bytes that already count against the memory limit; 0 where the system does not report them."""
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="ascii", errors="replace").splitlines() if status.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:")), 0)


def _prepare_for_hub(hub: HubQuestion) -> None:
    os.environ.update(hub.proxies)
    constants.ENDPOINT = hub.endpoint
    constants.HUGGINGFACE_CO_URL_TEMPLATE = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    constants.HF_HUB_OFFLINE = hub.is_offline


def _certificates() -> tuple[Path, ...]:
    return tuple(Path(os.environ[name]) for name in ("SSL_CERT_FILE", "SSL_CERT_DIR") if os.environ.get(name))


def _images_of(question: Question) -> tuple[Path, ...]:
    """Return the operator's folder of calibration data if the request names a file there that may name images."""
    dataset = Path(question.dataset)
    is_local = question.request.calibration.dataset.startswith(LOCAL)
    return (dataset.parent,) if is_local and dataset.suffix.lower() == ".jsonl" else ()


def _files_of(folder: Path) -> tuple[Path, ...]:
    # In a cache of the Hub, the files of a snapshot are links to these.
    blobs = folder.parent.parent / "blobs"
    return (folder, blobs) if folder.parent.name == "snapshots" and blobs.is_dir() else (folder,)


def _answer(question: Question) -> Answer:
    name = question.request.model_id if question.hub is None else "the model repository"
    try:
        return Answer(judged=judge(question))
    except (RocketError, AppError) as error:
        return Answer(refusal=Refusal.of(error))
    except MemoryError:
        refusal = UnsupportedArchitectureError(f"the files of {name} take too much memory to read; check the model")
        return Answer(refusal=Refusal.of(refusal))
    except Exception as error:  # noqa: BLE001  # untrusted files must not become an error of the service
        refusal = UnsupportedArchitectureError(
            f"the files of {name} cannot be understood ({type(error).__name__}); check its config.json and headers"
        )
        return Answer(refusal=Refusal.of(refusal), fault=_locations(error))


def _locations(error: Exception) -> tuple[str, ...]:
    """Return an error's class and its places in this project, without the message, which may quote the files."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [Path(frame.filename) for frame in frames]
    locations = [
        f"{path.relative_to(_ROOT).with_suffix('').as_posix().replace('/', '.')}:{frame.lineno}"
        for path, frame in zip(inside, frames, strict=True)
        if path.is_relative_to(_ROOT)
    ]
    return (type(error).__name__[:100], *locations[-8:])
