"""Arguments and options of the commands, each declared once."""

from collections.abc import Callable
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from rocket_cli import completion
from rocket_client._defaults import DEFAULT_SERVER, SERVER_VARIABLE
from rocket_core import config
from rocket_core.engines import ENGINES, EngineName
from rocket_core.report.figures import ERROR_NAMES
from rocket_core.sizes.budget import BudgetUnit
from rocket_core.sizes.target import parse_size
from rocket_core.sizes.token_counts import parse_tokens


class QueueChoice(StrEnum):
    """The queues of a service, as an enumeration because typer does not support Literals."""

    CPU = "cpu"
    GPU = "gpu"


class IncludeChoice(StrEnum):
    """What `--include` accepts: the entries of the setting, and a word for none."""

    EMBEDDINGS = "embeddings"
    VISION = "vision"
    NONE = "none"


class ExportChoice(StrEnum):
    """The values of `ExportKind`, as an enumeration because typer does not support lists of Literals."""

    FACTORED = "factored"
    DENSE = "dense"
    COMPRESSED_TENSORS = "compressed-tensors"
    GGUF = "gguf"


def argument(metavar: str, text: str, shown: bool | str = True, **more: Any) -> Any:
    """Return the declaration of an argument.

    Args:
        metavar: its name in the help.
        text: its help.
        shown: the default that the help shows; True is the value itself.
        more: further arguments of `typer.Argument`.
    """
    return typer.Argument(metavar=metavar, help=text, show_default=shown, **more)


def option(metavar: str | None, text: str, shown: bool | str = True, *, name: str | None = None, **more: Any) -> Any:
    """Return the declaration of an option that takes a value.

    Args:
        metavar: what the help shows for the value; None takes the name of its type.
        text: its help.
        shown: the default that the help shows; True is the value itself.
        name: its name, if it is not that of the parameter.
        more: further arguments of `typer.Option`.
    """
    names = () if name is None else (name,)
    return typer.Option(*names, metavar=metavar, help=text, show_default=shown, **more)


# Under these headings of the help, advanced options follow the others.
_DATA, _METHOD, _RUN = "Calibration and evaluation", "Method", "Model and files"
_of_data, _of_method, _of_run = (partial(option, rich_help_panel=panel) for panel in (_DATA, _METHOD, _RUN))


def _reader(parse: Callable[[str], int]) -> Callable[[str | int], int]:
    """Return the parser of an option, whose errors are those of the command line."""

    def read(given: str | int) -> int:
        try:
            return parse(str(given))  # defaults are parsed as well
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return read


_size, _tokens = _reader(parse_size), _reader(parse_tokens)


def _ratio(text: str) -> float:
    number = text.removesuffix("%")
    try:
        value = float(number)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a valid number; use for example 0.3 or 30%") from None
    if text.endswith("%"):
        return value / 100
    if 1 <= value < 100:
        raise typer.BadParameter(f"{text} is not less than 1; to remove {text} %, use {value / 100:.6g} or {text}%")
    return value


_EXPORTS = ", ".join(ExportChoice)
_WINDOW_DEFAULT = "1024, or the model's maximum if that is less"
_EVALUATION = config.EvaluationConfig()
_TASKS = (
    f"Zero-shot task: {', '.join(config.HUB_TASKS)}, or a %s file of items; repeatable. Requires the "
    "`evaluation` extra."
)

Model = Annotated[str, argument("MODEL", "A local folder, or a repository on the Hugging Face Hub.", shown=False)]
Output = Annotated[Path, argument("OUT", "Output folder; each export is written to its own subfolder.")]
Ratio = Annotated[
    float | None,
    option(
        "R",
        "Fraction of the compressible parameters to remove, at least 0 and less than 1, such as 0.3 or 30%. One "
        "of this, --size and --bits is required.",
        shown=False,
        parser=_ratio,
    ),
]
Size = Annotated[
    int | None,
    option(
        "SIZE",
        "Maximum size of the weights on disk, in the format that --for decides: a number of bytes, or 500MB, "
        "1.5GiB. Instead of --ratio.",
        shown=False,
        parser=_size,
    ),
]
Bits = Annotated[
    float | None,
    option(
        "N",
        "Maximum bits per weight of the compressible layers, scales and masks included, above 0 and up to 16, "
        "such as 4.5. Instead of --ratio.",
        shown=False,
    ),
]
HealingTokens = Annotated[
    int,
    option(
        "N", "Tokens to read, such as 500k or 2M; text that has fewer is read again.", name="--tokens", parser=_tokens
    ),
]
Heal = Annotated[
    int | None,
    option(
        "TOKENS",
        "Train the numbers that the result stores towards the original's predictions, on this many tokens of the "
        "calibration text, such as 2M: recovers part of the loss at the same size. Requires memory for two copies of "
        "the model. Not with --for vllm or llama.cpp.",
        "no training",
        name="--heal",
        parser=_tokens,
    ),
]
Calibration = Annotated[
    str,
    option(
        "NAME_OR_PATH",
        "Calibration text: best a .txt or .jsonl file like what the model will read; or "
        f"{config.BUILTIN_DATASET} (CPython's documentation, offline), {', '.join(config.HUB_DATASETS)}. For an image "
        "or audio model: a folder of .png and .jpg files or of .wav files, or "
        f"{config.SYNTHETIC_DATASET} (generated data, at a cost in quality).",
    ),
]
_SAMPLES = _of_data("N", "Number of calibration windows (text, audio) or images.")
Samples = Annotated[int, _SAMPLES]
SequenceLength = Annotated[int | None, _of_data("N", "Tokens per window.", _WINDOW_DEFAULT)]
_SEED = _of_data("N", "Seed for drawing the windows.")
Seed = Annotated[int, _SEED]
_OBJECTIVE = _of_method(
    "NAME",
    f"What to minimise: {'; '.join(f'{name}, the {error}' for name, error in ERROR_NAMES.items())}, with a cap on "
    "the error of each layer.",
    "the preset's",
)
Objective = Annotated[config.Objective | None, _OBJECTIVE]
Preset = Annotated[
    config.Preset | None,
    option(
        "NAME",
        "Named settings: fast, best (lower loss, about twice as long), max (best with --refine, about four times "
        "as long), or paper (exactly the paper's algorithm). Explicit options take precedence.",
        config.DEFAULT_PRESET,
    ),
]
Engine = Annotated[
    EngineName | None,
    option(
        "ENGINE",
        f"What will run the result: {', '.join(ENGINES)}; rocket is transformers with rocket_core.hf. Decides how "
        "layers may be stored, and which files are written.",
        "rocket",
        name="--for",
    ),
]
Method = Annotated[
    config.Method | None,
    _of_method(
        "NAME",
        "rocket, or a baseline: rocket-uniform, svd-llm, cospadi, magnitude, wanda, sparsegpt; or rtn or gptq, "
        "which take --code-bits instead of --ratio, --size or --bits.",
        "rocket",
    ),
]
CodeBits = Annotated[
    list[int] | None,
    _of_method(
        "N",
        "Bits of a weight's code, 2 to 8: those to choose from with --size, --bits or --budget bytes "
        "(repeatable; then no layer is entropy coded or has factors of codes), or the one of --method rtn or gptq.",
        "all; 4 for rtn and gptq",
    ),
]
GroupSize = Annotated[
    list[int] | None,
    _of_method(
        "N",
        "Inputs that share a scale, 8, 16, 32, 64, 128, or 0 for all of an output: those to choose from "
        "(repeatable), or the one of --method rtn or gptq, from 32 on.",
        "all but 128; 32 for rtn and gptq",
    ),
]
ValueBits = Annotated[
    int | None,
    _of_method(
        "N", "With --ratio of parameters: bits of each number that is kept, 16, 8 or 4; 8 and 4 round afterwards.", "16"
    ),
]
Refine = Annotated[
    bool | None,
    typer.Option(
        "--refine/--no-refine",
        help="Tune each block after its layers are compressed, codes included, towards what the dense model computes: "
        "takes two to four times as long, at the same size. For --preset best; max has it.",
        show_default="the preset's",
        rich_help_panel=_METHOD,
    ),
]
CalibrateAllExperts = Annotated[
    bool | None,
    typer.Option(
        "--calibrate-all-experts",
        help="Calibrate every expert of a mixture on all tokens, instead of those that its router sends to it.",
        show_default=False,
    ),
]
Budget = Annotated[BudgetUnit | None, _of_method("UNIT", "Unit of the ratio: parameters or bytes.", "parameters")]
Include = Annotated[
    list[IncludeChoice] | None,
    _of_method(
        "WHAT",
        "What to compress besides the layers in the language model's blocks: embeddings (token embedding and "
        "head), vision (the tower for images, which needs --calibration with images), or none; repeatable. By default "
        "embeddings with --size, none otherwise.",
        shown=False,
    ),
]
Ignore = Annotated[
    list[str] | None, _of_method("PATTERN", "Layers not to compress, such as '*.down_proj' or lm_head; repeatable.")
]
Export = Annotated[
    list[ExportChoice] | None,
    _of_run(
        "KIND",
        f"Format to write: {_EXPORTS}; repeatable. `rocket export` makes others later.",
        "the one that the engine reads",
    ),
]
Device = Annotated[str, _of_run("DEVICE", "auto, cpu, cuda, cuda:1, ...")]
_DTYPE = _of_run(
    "DTYPE",
    "Data type in which the model runs and is stored: auto (that of the checkpoint), float32, float16 or bfloat16.",
)
Dtype = Annotated[config.StorageDtype, _DTYPE]
_PRECISION = _of_method("DTYPE", "Precision of the factorization: float32, or float64, which is slower.")
Precision = Annotated[config.Precision, _PRECISION]
Revision = Annotated[str | None, _of_run("NAME", "Branch, tag or commit of the repository.", "main")]
Resume = Annotated[bool, typer.Option("--resume", help="Resume an interrupted run.")]
Energy = Annotated[
    bool,
    typer.Option(
        "--energy/--no-energy",
        help="Measure the energy used by each stage with codecarbon, offline.",
        rich_help_panel=_RUN,
    ),
]
Profiles = Annotated[
    Path | None,
    _of_run(
        "DIR",
        "Cache layer profiles and calibration statistics in this folder, and reuse them: another ratio "
        "then needs no second calibration.",
        "no cache",
    ),
]
Table = Annotated[bool, typer.Option("--table", help="Show all layers in the table, however many.")]
HealedFrom = Annotated[Path, argument("ARTIFACT", "A factored export, or the output folder of `rocket compress`.")]
HealingText = Annotated[
    str | None,
    option(
        "NAME",
        "Text to train on: the same names as for `rocket submit`.",
        "that of the job",
        name="--calibration",
        autocompletion=completion.calibration_names,
    ),
]
HealingLength = Annotated[int | None, option("N", "Tokens per window.", "that of the job", name="--sequence-length")]
HealingSeed = Annotated[int | None, option("N", "Seed for drawing the windows.", "that of the job", name="--seed")]
Original = Annotated[
    str | None,
    option(
        "MODEL",
        "The model that it was made from: a local folder, or a repository on the Hub.",
        "the repository that its report names",
        name="--model",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Write the report, or an error, to stdout as JSON.")]

Text = Annotated[Path, option("FILE", 'A .txt file, or a .jsonl file of {"text": ...} documents.')]
Limit = Annotated[int | None, option("N", "Maximum number of windows to read.", "all")]
Against = Annotated[
    str | None, option("ORIGINAL", "The original of MODEL: measure it too, and how far MODEL deviates from it.")
]
Stride = Annotated[
    int | None,
    option(
        "N",
        "Tokens from the start of one window to the next; a smaller stride gives tokens more context, "
        "but takes longer.",
        "the window's length",
    ),
]
_TASK_ITEMS = _of_data("N", "Maximum number of items per task.", "all")
TaskItems = Annotated[int | None, _TASK_ITEMS]
Tasks = Annotated[list[str] | None, _of_data("NAME_OR_FILE", _TASKS % ".jsonl", name="--task")]

Storage = Annotated[
    config.Storage | None,
    _of_method(
        "WHAT", "What a size keeps small: the file, where layers may be entropy coded, or the memory as well.", "file"
    ),
]
EvaluateOn = Annotated[
    str | None,
    option(
        "NAME_OR_FILE",
        "Evaluate the original and the compressed model on this text afterwards; the same names as for --calibration. "
        "Requires memory for the whole model.",
        "no evaluation",
        name="--evaluate",
    ),
]
EvaluateJobOn = Annotated[
    str | None,
    option(
        "NAME",
        "Text that both models read; the same names as for `rocket submit --calibration`.",
        config.BUILTIN_DATASET,
        name="--evaluate",
    ),
]
EvaluateSamples = Annotated[int | None, _of_data("N", "Number of evaluation windows.", str(_EVALUATION.samples))]
EvaluateLength = Annotated[int | None, _of_data("N", "Tokens per evaluation window.", _WINDOW_DEFAULT)]
EvaluateStride = Annotated[
    int | None, _of_data("N", "Tokens from the start of one evaluation window to the next.", "the window's length")
]
Prompts = Annotated[
    list[str] | None,
    _of_data(
        "TEXT",
        "Prompt that the original and the compressed model both answer; shows where they diverge. Repeatable.",
        name="--prompt",
    ),
]
AnswerTokens = Annotated[
    int | None, _of_data("N", "Tokens of the longest answer to a prompt.", str(_EVALUATION.answer_tokens), min=1)
]
Benchmark = Annotated[
    bool,
    typer.Option(
        "--benchmark",
        help="Measure speed and memory of the original and of each export afterwards. Requires memory for all of them.",
    ),
]
ServerTasks = Annotated[list[str] | None, _of_data("NAME", _TASKS % "local/FILE.jsonl", name="--task")]


# Options of commands that talk to a server. Only given options are sent; the server has the defaults.
Server = Annotated[str, option("URL", "Address of the server.", DEFAULT_SERVER, envvar=SERVER_VARIABLE)]
JobId = Annotated[str, argument("JOB", "Id of a job, as listed by `rocket jobs`.", autocompletion=completion.job_ids)]
JobOrProfile = Annotated[
    str,
    argument(
        "JOB_OR_PROFILE",
        "Id of a profile, or of a job that has profiled its layers.",
        autocompletion=completion.jobs_and_profiles,
    ),
]
ServerModel = Annotated[
    str,
    argument(
        "MODEL_ID",
        "local/NAME from the server's models folder, or a repository on the Hub.",
        autocompletion=completion.model_ids,
    ),
]
EstimatedModel = Annotated[
    str,
    argument(
        "MODEL",
        "A local folder, a repository on the Hub, or local/NAME or upload/NAME of a server.",
        autocompletion=completion.model_ids,
    ),
]
Local = Annotated[
    bool, typer.Option("--local", help="Estimate a run on this machine even if MODEL is a repository on the Hub.")
]
ServerCalibration = Annotated[
    str | None,
    option(
        "NAME",
        f"Calibration text: {config.BUILTIN_DATASET} (the default), {', '.join(config.HUB_DATASETS)}, or "
        "local/FILE from the server's datasets folder, or the id that `rocket upload` prints. For an image or audio "
        f"model: local/FOLDER, or {config.SYNTHETIC_DATASET} (generated data, at a cost in quality).",
        autocompletion=completion.calibration_names,
    ),
]
ServerSamples = Annotated[int | None, _SAMPLES]
ServerSeed = Annotated[int | None, _SEED]
ServerDtype = Annotated[config.StorageDtype | None, _DTYPE]
ServerPrecision = Annotated[config.Precision | None, _PRECISION]
Metadata = Annotated[list[str] | None, option("KEY=VALUE", "Label for the job; repeatable.")]
HubTokenVariable = Annotated[
    str | None,
    option(
        "VARIABLE",
        "Environment variable that holds a Hugging Face Hub token, for private and gated repositories.",
        name="--hub-token-env",
    ),
]
JobQueue = Annotated[
    QueueChoice | None,
    typer.Option(
        "--queue",
        help="Queue of the job, which determines the workers that may run it.",
        show_default="the server's default",
    ),
]
IdempotencyKey = Annotated[str | None, option("KEY", "A second submission with the same key returns the first job.")]
Watch = Annotated[bool, typer.Option("--watch", help="Follow the job until it ends.")]
Wait = Annotated[bool, typer.Option("--wait", help="Wait until the job has stopped.")]
Status = Annotated[
    str | None,
    option(
        "STATUS",
        "Only jobs with this status: queued, running, cancelling, succeeded, failed or cancelled.",
        autocompletion=completion.statuses,
    ),
]
JobLimit = Annotated[int, option("N", "Maximum number of jobs.", min=1)]
After = Annotated[str | None, option("JOB", "Only jobs older than this one.", autocompletion=completion.job_ids)]
DownloadFolder = Annotated[Path | None, argument("DIR", "Folder for the files.", "a folder named after the job")]
DownloadExport = Annotated[
    list[ExportChoice] | None, option("KIND", f"Only this export: {_EXPORTS}; repeatable.", "all", name="--export")
]
JsonResult = Annotated[bool, typer.Option("--json", help="Write the result, or an error, to stdout as JSON.")]
