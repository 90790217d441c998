"""A model run by `transformers`, as a user of `generate` runs it."""

import time
import warnings
from typing import Any, cast

import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

import rocket_core.hf  # noqa: F401 - teaches transformers to load compressed folders
from rocket_core.errors import UnsupportedArchitectureError
from rocket_core.evaluation import load_model, open_model
from rocket_core.inspection.headers.model_fields import positions
from rocket_core.report.speed import RoundTimes
from rocket_core.speed.messages import Load, Loaded, Measure
from rocket_core.system.devices import resolve_device


class TransformersModel:
    """A loaded model.

    Args:
        request: what to load.

    Raises:
        UnsupportedArchitectureError: the model does not generate text.
        RocketError: it cannot be loaded.
    """

    def __init__(self, request: Load) -> None:
        torch.set_num_threads(request.threads)
        self._device = resolve_device(request.device)
        subject = request.subject
        folder = open_model(subject.path)
        if not folder.predicts_tokens:
            raise UnsupportedArchitectureError(
                f"{subject.path} predicts no tokens; speed is measured of models that generate text"
            )
        if subject.packing != "default":
            folder.config.quantization_config["keep_packed"] = subject.packing == "packed"
        began = time.perf_counter()
        self._model: Any = load_model(folder, self._device, as_deployed=True)
        seconds = time.perf_counter() - began
        self.loaded = Loaded(
            vocabulary=int(cast("torch.Tensor", self._model.get_input_embeddings().weight).shape[0]),
            positions=positions(folder.config.to_dict()),
            device=str(self._device),
            dtype=str(self._model.dtype).removeprefix("torch."),
            seconds=seconds,
        )

    def measure(self, request: Measure) -> RoundTimes:
        """Read a prompt and generate greedily; no token ends the answer."""
        prompt = torch.tensor([request.prompt], device=self._device)
        clock = _Clock()
        settings = GenerationConfig(
            max_new_tokens=request.new_tokens, min_new_tokens=request.new_tokens, do_sample=False, num_beams=1
        )
        with warnings.catch_warnings():
            # About settings of sampling in the folder, which are not used.
            warnings.simplefilter("ignore")
            began = time.perf_counter()
            self._model.generate(
                prompt, attention_mask=torch.ones_like(prompt), generation_config=settings, streamer=clock
            )
        assert len(clock.times) == 1 + request.new_tokens, "the prompt and every token are passed on"
        return RoundTimes(prompt_seconds=clock.times[1] - began, generation_seconds=clock.times[-1] - clock.times[1])

    def device_bytes(self) -> int | None:
        """Return the bytes allocated on an accelerator; None on the CPU."""
        if self._device.type == "cpu":
            return None
        return int(torch.accelerator.memory_allocated(self._device))

    def weights_bytes(self) -> int:
        """Return the bytes of all parameters and buffers."""
        return int(self._model.get_memory_footprint())


class _Clock(BaseStreamer):
    """Times at which `generate` passes on the prompt and every token; tokens are on the CPU by then."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        """Take a token."""
        del value
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing: the last token has been passed on."""
