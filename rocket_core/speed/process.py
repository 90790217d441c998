"""Process that runs one model and is told when to measure; `rocket_core.speed.child` starts it.

It exits as soon as the other side closes the connection, whatever it is doing.
"""

from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Protocol

from rocket_core.report.speed import RoundTimes, Runtime
from rocket_core.speed.messages import Load, Loaded, Measure, Measured
from rocket_core.system.child_process import answer, serve
from rocket_core.system.process_memory import resident_bytes


class LoadedModel(Protocol):
    """A model that is ready to run."""

    @property
    def loaded(self) -> Loaded:
        """What it is."""

    def measure(self, request: Measure) -> RoundTimes:
        """Read a prompt and generate."""

    def device_bytes(self) -> int | None:
        """Return the bytes that it holds on an accelerator; None on the CPU."""

    def weights_bytes(self) -> int | None:
        """Return the bytes of its weights as it holds them; None if they are not known."""


def main(arguments: Sequence[str]) -> None:
    """Load a model, and measure it whenever that is requested.

    Args:
        arguments: descriptors of two pipes, for requests and answers.
    """
    serve(arguments, _serve)


def _serve(source: Connection, target: Connection) -> None:
    request = Load.model_validate_json(source.recv_bytes())
    path = request.subject.path
    files = (path,) if path.is_file() else tuple(path.glob("*.safetensors"))
    load = _loader(request.subject.runtime)
    before = resident_bytes(files)
    model = load(request)
    answer(target, model.loaded)
    while True:
        times = model.measure(Measure.model_validate_json(source.recv_bytes()))
        held = model.device_bytes()
        if held is None:
            after = resident_bytes(files)
            held = None if before is None or after is None else max(0, after - before)
        answer(target, Measured(times=times, memory_bytes=held, weights_bytes=model.weights_bytes()))


def _loader(runtime: Runtime) -> Callable[[Load], LoadedModel]:
    """Import what runs a model; this takes memory that is not the model's."""
    if runtime == "llama.cpp":
        from rocket_core.speed.llama_cpp_runtime import LlamaCppModel

        return LlamaCppModel
    from rocket_core.speed.transformers_runtime import TransformersModel

    return TransformersModel
