"""Options of the commands that compress, submit, estimate or profile a model, each group declared once."""

from dataclasses import dataclass
from typing import Any

import typer

from rocket_cli import options
from rocket_core.config import ONE_FORMAT_METHODS, CalibrationConfig, CompressionConfig, compression_config

_DEFAULTS = CompressionConfig(ratio=0)
_CALIBRATION = CalibrationConfig()


@dataclass(frozen=True, kw_only=True)
class CompressionOptions:
    """How to compress a model; options that are None were not given and take the defaults."""

    ratio: options.Ratio = None
    size: options.Size = None
    bits: options.Bits = None
    calibration: options.ServerCalibration = None
    samples: options.ServerSamples = None
    sequence_length: options.SequenceLength = None
    seed: options.ServerSeed = None
    preset: options.Preset = None
    method: options.Method = None
    code_bits: options.CodeBits = None
    group_size: options.GroupSize = None
    value_bits: options.ValueBits = None
    refine: options.Refine = None
    heal: options.Heal = None
    calibrate_all_experts: options.CalibrateAllExperts = None
    objective: options.Objective = None
    budget: options.Budget = None
    storage: options.Storage = None
    engine: options.Engine = None
    evaluate: options.EvaluateOn = None
    evaluate_samples: options.EvaluateSamples = None
    evaluate_length: options.EvaluateLength = None
    evaluate_stride: options.EvaluateStride = None
    task: options.ServerTasks = None
    task_items: options.TaskItems = None
    prompt: options.Prompts = None
    answer_tokens: options.AnswerTokens = None
    benchmark: options.Benchmark = False
    include: options.Include = None
    ignore: options.Ignore = None
    export: options.Export = None

    def check_target(self) -> None:
        """Raise typer.BadParameter unless one of `--ratio`, `--size` and `--bits` is given, or none with a format."""
        given = sum(value is not None for value in (self.ratio, self.size, self.bits))
        if self.method in ONE_FORMAT_METHODS:
            if self.bits is not None:
                message = f"is for the method rocket; {self.method} takes --code-bits"
                raise typer.BadParameter(message, param_hint="--bits")
            if given == 0:
                return
        if given != 1:
            raise typer.BadParameter("specify exactly one of them", param_hint="--ratio, --size or --bits")

    def evaluation(self) -> dict[str, Any] | None:
        """Return the given settings of the evaluation; None if it was not asked for."""
        settings = {
            "dataset": self.evaluate,
            "samples": self.evaluate_samples,
            "sequence_length": self.evaluate_length,
            "stride": self.evaluate_stride,
            "tasks": self.task,
            "task_items": self.task_items,
            "prompts": self.prompt,
            "answer_tokens": self.answer_tokens,
        }
        return _without_none(settings) or None

    def config(self, **machine: Any) -> CompressionConfig:
        """Return the settings of a run on this machine.

        Args:
            machine: settings that only some commands have; None takes the default.

        Raises:
            InvalidConfigError: they are not valid.
        """
        return compression_config(
            ratio=self.ratio,
            target_bytes=self.size,
            bits=self.bits,
            calibration=self._calibration(),
            **self._method(),
            evaluate=self.evaluation(),
            benchmark=self.benchmark,
            ignore=tuple(self.ignore or _DEFAULTS.ignore),
            **({"export": self._exports()} if self.export else {}),
            **_without_none(machine),
        )

    def _calibration(self) -> dict[str, Any]:
        return _without_none(
            {
                "dataset": self.calibration,
                "samples": self.samples,
                "sequence_length": self.sequence_length,
                "seed": self.seed,
            }
        )

    def _method(self) -> dict[str, Any]:
        return _without_none(
            {
                "preset": self.preset,
                "method": self.method,
                "code_bits": self.code_bits,
                "group_size": self.group_size,
                "value_bits": self.value_bits,
                "refine": self.refine,
                "heal_tokens": self.heal,
                "calibrate_all_experts": self.calibrate_all_experts,
                "objective": self.objective,
                "budget": self.budget,
                "include": self._include(),
                "storage": self.storage,
                "engine": self.engine,
            }
        )

    def _include(self) -> list[str] | None:
        if not self.include:
            return None
        if options.IncludeChoice.NONE in self.include:
            if len(self.include) > 1:
                raise typer.BadParameter("none excludes everything else", param_hint="--include")
            return []
        return [choice.value for choice in self.include]

    def _exports(self) -> tuple[str, ...]:
        return tuple(kind.value for kind in self.export or ())


@dataclass(frozen=True, kw_only=True)
class ServerOptions(CompressionOptions):
    """How a server compresses a model; only options that are given are sent, as the server has the defaults."""

    dtype: options.ServerDtype = None
    precision: options.ServerPrecision = None
    revision: options.Revision = None

    def request(self) -> dict[str, Any]:
        """Return the arguments that `Rocket.submit`, `estimate` and `profile` have in common."""
        settings = _without_none({"ignore": self.ignore, "dtype": self.dtype, "precision": self.precision})
        exports = {"export": list(self._exports())} if self.export else {}
        return {
            "revision": self.revision,
            "calibration": self._calibration(),
            "options": self._method() | settings | exports,
        }

    def compression_request(self) -> dict[str, Any]:
        """Return the arguments that `Rocket.submit` and `estimate` have in common."""
        return self.request() | {
            "ratio": self.ratio,
            "target_bytes": self.size,
            "bits": self.bits,
            "evaluate": self.evaluation(),
            "benchmark": self.benchmark,
        }


@dataclass(frozen=True, kw_only=True)
class LocalOptions(CompressionOptions):
    """How this machine compresses a model."""

    calibration: options.Calibration = _CALIBRATION.dataset
    samples: options.Samples = _CALIBRATION.samples
    sequence_length: options.SequenceLength = _CALIBRATION.sequence_length
    seed: options.Seed = _CALIBRATION.seed
    task: options.Tasks = None
    device: options.Device = _DEFAULTS.device
    dtype: options.Dtype = _DEFAULTS.dtype
    precision: options.Precision = _DEFAULTS.precision
    revision: options.Revision = None
    profiles: options.Profiles = None
    energy: options.Energy = True
    resume: options.Resume = False


@dataclass(frozen=True, kw_only=True)
class SubmissionOptions:
    """How a job is submitted."""

    metadata: options.Metadata = None
    queue: options.JobQueue = None
    idempotency_key: options.IdempotencyKey = None
    hub_token_env: options.HubTokenVariable = None
    watch: options.Watch = False


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
