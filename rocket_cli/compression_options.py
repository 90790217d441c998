"""Options of the commands that compress, submit, estimate or profile a model, each group declared once."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import typer

from rocket_cli import completion, options
from rocket_cli.option_groups import group_field
from rocket_core import config as core  # the groups have a method of that name
from rocket_core.engines import ENGINES, EngineName
from rocket_core.errors import ExitCode
from rocket_core.report.figures import ERROR_NAMES
from rocket_core.sizes.budget import BudgetUnit
from rocket_core.sizes.target import LossMeasure, parse_size

_DEFAULTS = core.CompressionConfig(ratio=0)
_CALIBRATION = core.CalibrationConfig()
_EVALUATION = core.EvaluationConfig()

# Names of the settings of each part of a configuration, by the options that give them.
_CALIBRATION_SETTINGS = {name: name for name in ("samples", "sequence_length", "seed", "skip_bad_rows", "pack")} | {
    "calibration": "dataset",
    "calibration_column": "column",
}
EVALUATION_SETTINGS = {
    "evaluate": "dataset",
    "evaluate_samples": "samples",
    "evaluate_length": "sequence_length",
    "evaluate_stride": "stride",
    "task": "tasks",
    "task_items": "task_items",
    "prompt": "prompts",
    "answer_tokens": "answer_tokens",
}
TARGETS = ("ratio", "size", "bits", "fit", *get_args(LossMeasure))
CONTEXT_OPTIONS = ("context", "batch", "kv_bits")
ACCEPTANCE_SETTINGS = {
    "accept_kl": "max_kl",
    "accept_perplexity_increase": "max_perplexity_increase",
    "accept_task_drop": "max_task_drop",
}
_METHOD_NAMES = ("preset", "method", "code_bits", "group_size", "value_bits", "refine", "calibrate_all_experts")
_METHOD_SETTINGS = {name: name for name in (*_METHOD_NAMES, "objective", "budget", "storage", "engine")}


def _setting(metavar: str | None, text: str, shown: bool | str = True, *, default: Any = None, **more: Any) -> Any:
    return group_field(options.option(metavar, text, shown, **more), default)


_of_data, _of_method, _of_run = (
    partial(_setting, rich_help_panel=panel) for panel in (options.DATA, options.METHOD, options.RUN)
)


@dataclass(frozen=True, kw_only=True)
class CompressionOptions:
    """How to compress a model; options that are None were not given and take the defaults."""

    ratio: float | None = _setting(
        "R",
        "Fraction of the compressible parameters to remove, at least 0 and less than 1, such as 0.3 or 30%. One "
        "of this, --size, --bits, --fit, --max-kl and --max-perplexity-increase is required.",
        shown=False,
        parser=options.read_ratio,
    )
    size: int | None = _setting(
        "SIZE",
        "Maximum size of the weights on disk, in the format that --for decides: a number of bytes, or 500MB, "
        "1.5GiB. Instead of --ratio. Loaded weights may take more: --storage memory bounds them as well.",
        shown=False,
        parser=options.reader(parse_size),
    )
    bits: float | None = _setting(
        "N",
        "Maximum bits per weight of the compressible layers, scales and masks included, above 0 and up to 16, "
        "such as 4.5. Instead of --ratio.",
        shown=False,
    )
    fit: options.FitMemory = None
    context: options.FitContext = None
    batch: options.FitBatch = None
    kv_bits: options.FitKvBits = None
    max_kl: float | None = _setting(
        "NATS",
        "Maximum KL divergence from the original, in nats per token, such as 0.02, with files as small as possible. It "
        "is measured after each of some sizes, on the text of --evaluate, by default on what the calibration leaves of "
        "its own. Instead of --ratio.",
        shown=False,
    )
    max_perplexity_increase: float | None = _setting(
        "R",
        "Maximum increase of the perplexity, such as 0.02 or 2%; otherwise like --max-kl.",
        shown=False,
        parser=options.read_fraction,
    )
    calibration: str | None = _setting(
        "NAME",
        f"Calibration text: {core.BUILTIN_DATASET} (the default), {', '.join(core.HUB_DATASETS)}, or "
        "namespace/name:split on the Hub, local/FILE from the server's datasets folder, or the id that `rocket upload` "
        "prints. For an image or audio "
        f"model: local/FOLDER, or {core.SYNTHETIC_DATASET} (generated data, at a cost in quality).",
        autocompletion=completion.calibration_names,
    )
    samples: options.Samples = None
    sequence_length: options.CalibrationLength = None
    seed: options.Seed = None
    calibration_column: options.Column = None
    skip_bad_rows: options.SkipBadRows = None
    pack: options.Pack = None
    preset: core.Preset | None = _setting(
        "NAME",
        "Named settings: fast, best (lower loss, about twice as long), max (best with --refine, about four times "
        "as long), paper (exactly the paper's algorithm), or instant (from the weights alone, without calibration: "
        "least time, more loss). Explicit options take precedence.",
        core.DEFAULT_PRESET,
    )
    method: core.Method | None = _of_method(
        "NAME",
        "rocket, or a baseline: rocket-uniform, svd-llm, cospadi, magnitude, wanda, sparsegpt; or rtn or gptq, "
        "which take --code-bits instead of --ratio, --size or --bits.",
        "rocket",
    )
    code_bits: list[int] | None = _of_method(
        "N",
        "Bits of a weight's code, 2 to 8: those to choose from with --size, --bits or --budget bytes "
        "(repeatable; then no layer is entropy coded or has factors of codes), or the one of --method rtn or gptq.",
        "all; 4 for rtn and gptq",
    )
    group_size: list[int] | None = _of_method(
        "N",
        "Inputs that share a scale, 8, 16, 32, 64, 128, or 0 for all of an output: those to choose from "
        "(repeatable), or the one of --method rtn or gptq, from 32 on.",
        "all but 128; 32 for rtn and gptq",
    )
    value_bits: int | None = _of_method(
        "N", "With --ratio of parameters: bits of each number that is kept, 16, 8 or 4; 8 and 4 round afterwards.", "16"
    )
    refine: bool | None = _of_method(
        None,
        "Tune each block after its layers are compressed, codes included, towards what the dense model computes: "
        "takes two to four times as long, at the same size. For --preset best; max has it.",
        "the preset's",
        name="--refine/--no-refine",
    )
    heal: int | None = _setting(
        "TOKENS",
        "Train the numbers that the result stores towards the original's predictions, on this many tokens of the "
        "calibration text, such as 2M: recovers part of the loss at the same size. Requires memory for two copies of "
        "the model. Not with --for vllm, llama.cpp, mlx or onnx.",
        "no training",
        parser=options.read_tokens,
    )
    calibrate_all_experts: bool | None = _setting(
        None,
        "Calibrate every expert of a mixture on all tokens, instead of those that its router sends to it.",
        shown=False,
        name="--calibrate-all-experts",
    )
    objective: core.Objective | None = _of_method(
        "NAME",
        f"What to minimise: {'; '.join(f'{name}, the {error}' for name, error in ERROR_NAMES.items())}, with a cap on "
        "the error of each layer.",
        "the preset's",
    )
    budget: BudgetUnit | None = _of_method("UNIT", "Unit of the ratio: parameters or bytes.", "parameters")
    storage: core.Storage | None = _of_method(
        "WHAT", "What a size keeps small: the file, where layers may be entropy coded, or the memory as well.", "file"
    )
    engine: EngineName | None = _setting(
        "ENGINE",
        f"What will run the result: {', '.join(ENGINES)}; rocket is Transformers (Rocket), with this library. Decides "
        "how layers may be stored, and which files are written.",
        "rocket",
        name="--for",
    )
    evaluate: str | None = _setting(
        "NAME_OR_FILE",
        "Evaluate the original and the compressed model on this text afterwards; the same names as for --calibration. "
        "Requires memory for the whole model.",
        "no evaluation",
    )
    evaluate_samples: int | None = _of_data("N", "Number of evaluation windows.", str(_EVALUATION.samples))
    evaluate_length: int | None = _of_data("N", "Tokens per evaluation window.", options.WINDOW_DEFAULT)
    evaluate_stride: int | None = _of_data(
        "N", "Tokens from the start of one evaluation window to the next.", "the window's length"
    )
    task: list[str] | None = _of_data("NAME", options.TASKS % "local/FILE.jsonl", name="--task")
    task_items: options.TaskItems = None
    prompt: options.Prompts = None
    answer_tokens: options.AnswerTokens = None
    accept_kl: float | None = _of_data(
        "NATS",
        "Accept the result only up to this KL divergence from the original, in nats per token, such as 0.05. It is "
        f"kept anyway; exit code {ExitCode.NOT_ACCEPTED:d} if it is not accepted.",
        "no verdict",
    )
    accept_perplexity_increase: float | None = _of_data(
        "R",
        "Accept only up to this increase of the perplexity, such as 0.02 or 2%.",
        "no bound",
        parser=options.read_fraction,
    )
    accept_task_drop: float | None = _of_data(
        "R",
        "Accept only up to this drop of the accuracy in each --task, such as 0.01 or 1% of all items.",
        "no bound",
        parser=options.read_fraction,
    )
    benchmark: bool = _setting(
        None,
        "Measure speed and memory of the original and of each export afterwards. Requires memory for all of them.",
        name="--benchmark",
        default=False,
    )
    include: list[options.IncludeChoice] | None = _of_method(
        "WHAT",
        "What to compress besides the layers in the language model's blocks: embeddings (token embedding and "
        "head), vision (the tower for images, which needs --calibration with images), or none; repeatable. By default "
        "embeddings with --size, none otherwise.",
        shown=False,
    )
    ignore: list[str] | None = _of_method(
        "PATTERN", "Layers not to compress, such as '*.down_proj' or lm_head; repeatable."
    )
    export: list[str] | None = _of_run(
        "KIND",
        f"Format to write: {options.EXPORTS}; repeatable. `rocket export` makes others later.",
        "the one that the engine reads",
        **options.EXPORT_VALUE,
    )

    def check_target(self, *, is_optional: bool = False) -> None:
        """Raise typer.BadParameter unless one target is given, or none with a format or if it is optional."""
        given = sum(getattr(self, name) is not None for name in TARGETS)
        if self.method in core.ONE_FORMAT_METHODS:
            if self.bits is not None:
                message = f"is for the method rocket; {self.method} takes --code-bits"
                raise typer.BadParameter(message, param_hint="--bits")
            if given == 0:
                return
        if given != 1 and not (is_optional and given == 0):
            hint = "--ratio, --size, --bits, --fit, --max-kl or --max-perplexity-increase"
            raise typer.BadParameter("specify exactly one of them", param_hint=hint)
        if self.fit is None:
            self._check_no_context()
        elif self.context is None:
            raise typer.BadParameter("depends on the context; add --context, such as --context 32k", param_hint="--fit")

    def _check_no_context(self) -> None:
        needless = next((name for name in CONTEXT_OPTIONS if getattr(self, name) is not None), None)
        if needless is not None:
            hint = f"--{needless.replace('_', '-')}"
            raise typer.BadParameter("is about a memory; add --fit, such as --fit 24GB", param_hint=hint)

    def memory_fit(self) -> dict[str, Any] | None:
        """Return the memory to fit into; None if another target is given."""
        context = self._given({name: name for name in CONTEXT_OPTIONS})
        return None if self.fit is None else {"memory_bytes": self.fit} | context

    def evaluation(self) -> dict[str, Any] | None:
        """Return the given settings of the evaluation; None if it was not asked for."""
        return self._given(EVALUATION_SETTINGS) or None

    def acceptance(self) -> dict[str, Any] | None:
        """Return the bounds that the result must meet; None if none is given.

        Raises:
            typer.BadParameter: nothing that is asked for measures one of them.
        """
        given = [option for option in ACCEPTANCE_SETTINGS if getattr(self, option) is not None]
        if given and self.evaluation() is None:
            hint = f"--{given[0].replace('_', '-')}"
            raise typer.BadParameter(
                "is about what --evaluate measures; add it, such as --evaluate builtin", param_hint=hint
            )
        if self.accept_task_drop is not None and not self.task:
            raise typer.BadParameter("is about tasks; add --task NAME", param_hint="--accept-task-drop")
        return self._given(ACCEPTANCE_SETTINGS) or None

    def config(self, **machine: Any) -> core.CompressionConfig:
        """Return the settings of a run on this machine.

        Args:
            machine: settings that only some commands have; None takes the default.

        Raises:
            InvalidConfigError: they are not valid.
        """
        return core.compression_config(
            ratio=self.ratio,
            target_bytes=self.size,
            bits=self.bits,
            fit=self.memory_fit(),
            max_kl=self.max_kl,
            max_perplexity_increase=self.max_perplexity_increase,
            calibration=self._calibration(),
            **self._method(),
            evaluate=self.evaluation(),
            accept=self.acceptance(),
            benchmark=self.benchmark,
            ignore=tuple(self.ignore or _DEFAULTS.ignore),
            **({"export": tuple(self.export)} if self.export else {}),
            **_without_none(machine),
        )

    def _given(self, settings: Mapping[str, str]) -> dict[str, Any]:
        return _without_none({setting: getattr(self, option) for option, setting in settings.items()})

    def _calibration(self) -> dict[str, Any]:
        return self._given(_CALIBRATION_SETTINGS)

    def _method(self) -> dict[str, Any]:
        others = {"heal_tokens": self.heal, "include": self._include()}
        return self._given(_METHOD_SETTINGS) | _without_none(others)

    def _include(self) -> list[str] | None:
        if not self.include:
            return None
        if options.IncludeChoice.NONE in self.include:
            if len(self.include) > 1:
                raise typer.BadParameter("none excludes everything else", param_hint="--include")
            return []
        return [choice.value for choice in self.include]


@dataclass(frozen=True, kw_only=True)
class ServerOptions(CompressionOptions):
    """How a server compresses a model; only options that are given are sent, as the server has the defaults."""

    dtype: options.Dtype = None
    precision: options.Precision = None
    revision: options.Revision = None

    def request(self) -> dict[str, Any]:
        """Return the arguments that `Rocket.submit`, `estimate` and `profile` have in common."""
        settings = _without_none({"ignore": self.ignore, "dtype": self.dtype, "precision": self.precision})
        exports = {"export": self.export} if self.export else {}
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
            "fit": self.memory_fit(),
            "max_kl": self.max_kl,
            "max_perplexity_increase": self.max_perplexity_increase,
            "evaluate": self.evaluation(),
            "accept": self.acceptance(),
            "benchmark": self.benchmark,
        }


@dataclass(frozen=True, kw_only=True)
class LocalOptions(CompressionOptions):
    """How this machine compresses a model."""

    calibration: options.Calibration = _CALIBRATION.dataset
    samples: options.Samples = _CALIBRATION.samples
    sequence_length: options.CalibrationLength = _CALIBRATION.sequence_length
    seed: options.Seed = _CALIBRATION.seed
    task: options.Tasks = None
    device: options.Devices = _DEFAULTS.device
    dtype: options.Dtype = _DEFAULTS.dtype
    precision: options.Precision = _DEFAULTS.precision
    revision: options.Revision = None
    profiles: Path | None = _of_run(
        "DIR",
        "Cache layer profiles and calibration statistics in this folder, and reuse them: another ratio "
        "then needs no second calibration.",
        "no cache",
    )
    energy: options.Energy = True
    resume: options.Resume = False


@dataclass(frozen=True, kw_only=True)
class SubmissionOptions:
    """How a job is submitted."""

    metadata: list[str] | None = _setting("KEY=VALUE", "Label for the job; repeatable.")
    queue: options.QueueChoice | None = _setting(
        None, "Queue of the job, which determines the workers that may run it.", "the server's default"
    )
    idempotency_key: str | None = _setting("KEY", "A second submission with the same key returns the first job.")
    hub_token_env: options.HubTokenVariable = None
    watch: options.Watch = False


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
