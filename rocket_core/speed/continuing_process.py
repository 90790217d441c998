"""Process that loads an export in its engine and continues a text once; `rocket_core.speed.child` starts it."""

from collections.abc import Sequence
from multiprocessing.connection import Connection

from rocket_core.speed.llama_cpp_runtime import LlamaCppModel
from rocket_core.speed.messages import Continue, Load
from rocket_core.speed.mlx_runtime import MlxModel
from rocket_core.system.child_process import answer, serve


def main(arguments: Sequence[str]) -> None:
    """Load a file, and continue a text.

    Args:
        arguments: descriptors of two pipes, for requests and answers.
    """
    serve(arguments, _serve)


def _serve(source: Connection, target: Connection) -> None:
    load = Load.model_validate_json(source.recv_bytes())
    model = LlamaCppModel(load) if load.subject.runtime == "llama.cpp" else MlxModel(load)
    answer(target, model.loaded)
    answer(target, model.continue_text(Continue.model_validate_json(source.recv_bytes())))
