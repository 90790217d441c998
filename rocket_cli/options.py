"""Arguments and options of the commands, each declared once."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

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


_EXPORTS = ", ".join(ExportChoice)
_WINDOW_DEFAULT = "1024, or the model's maximum if that is less"

# Headings of the help, under which advanced options follow the others.
_DATA = "Calibration and evaluation"
_METHOD = "Method"
_RUN = "Model and files"

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A local folder, or a repository on the Hugging Face Hub.", show_default=False
    ),
]
Output = Annotated[
    Path, typer.Argument(metavar="OUT", help="Output folder; each export is written to its own subfolder.")
]


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


Ratio = Annotated[
    float | None,
    typer.Option(
        metavar="R",
        parser=_ratio,
        help="Fraction of the compressible parameters to remove, at least 0 and less than 1, such as 0.3 or 30%. One "
        "of this, --size and --bits is required.",
        show_default=False,
    ),
]


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


Size = Annotated[
    int | None,
    typer.Option(
        metavar="SIZE",
        parser=_size,
        help="Maximum size of the weights on disk, in the format that --for decides: a number of bytes, or 500MB, "
        "1.5GiB. Instead of --ratio.",
        show_default=False,
    ),
]
Bits = Annotated[
    float | None,
    typer.Option(
        metavar="N",
        help="Maximum bits per weight of the compressible layers, scales and masks included, above 0 and up to 16, "
        "such as 4.5. Instead of --ratio.",
        show_default=False,
    ),
]


def _tokens(given: str | int) -> int:
    try:
        return parse_tokens(str(given))  # defaults are parsed as well
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


HealingTokens = Annotated[
    int,
    typer.Option(
        "--tokens",
        metavar="N",
        parser=_tokens,
        help="Tokens to read, such as 500k or 2M; text that has fewer is read again.",
    ),
]
Heal = Annotated[
    int | None,
    typer.Option(
        "--heal",
        metavar="TOKENS",
        parser=_tokens,
        help="Train the numbers that the result stores towards the original's predictions, on this many tokens of the "
        "calibration text, such as 2M: recovers part of the loss at the same size. Requires memory for two copies of "
        "the model. Not with --for vllm or llama.cpp.",
        show_default="no training",
    ),
]
Calibration = Annotated[
    str,
    typer.Option(
        metavar="NAME_OR_PATH",
        help="Calibration text: best a .txt or .jsonl file like what the model will read; or "
        f"{config.BUILTIN_DATASET} (CPython's documentation, offline), {', '.join(config.HUB_DATASETS)}. For an image "
        "or audio model: a folder of .png and .jpg files or of .wav files, or "
        f"{config.SYNTHETIC_DATASET} (generated data, at a cost in quality).",
    ),
]
_SAMPLES = typer.Option(
    metavar="N", help="Number of calibration windows (text, audio) or images.", rich_help_panel=_DATA
)
Samples = Annotated[int, _SAMPLES]
SequenceLength = Annotated[
    int | None,
    typer.Option(metavar="N", help="Tokens per window.", show_default=_WINDOW_DEFAULT, rich_help_panel=_DATA),
]
_SEED = typer.Option(metavar="N", help="Seed for drawing the windows.", rich_help_panel=_DATA)
Seed = Annotated[int, _SEED]
_OBJECTIVE = typer.Option(
    metavar="NAME",
    help=f"What to minimise: {'; '.join(f'{name}, the {error}' for name, error in ERROR_NAMES.items())}, with a cap on "
    "the error of each layer.",
    show_default="the preset's",
    rich_help_panel=_METHOD,
)
Objective = Annotated[config.Objective | None, _OBJECTIVE]
Preset = Annotated[
    config.Preset | None,
    typer.Option(
        metavar="NAME",
        help="Named settings: fast, best (lower loss, about twice as long), max (best with --refine, about four times "
        "as long), or paper (exactly the paper's algorithm). Explicit options take precedence.",
        show_default=config.DEFAULT_PRESET,
    ),
]
Engine = Annotated[
    EngineName | None,
    typer.Option(
        "--for",
        metavar="ENGINE",
        help=f"What will run the result: {', '.join(ENGINES)}; rocket is Transformers (Rocket), with this library. "
        "Decides how layers may be stored, and which files are written.",
        show_default="rocket",
    ),
]
Method = Annotated[
    config.Method | None,
    typer.Option(
        metavar="NAME",
        help="rocket, or a baseline: rocket-uniform, svd-llm, cospadi, magnitude, wanda, sparsegpt; or rtn or gptq, "
        "which take --code-bits instead of --ratio, --size or --bits.",
        show_default="rocket",
        rich_help_panel=_METHOD,
    ),
]
CodeBits = Annotated[
    list[int] | None,
    typer.Option(
        metavar="N",
        help="Bits of a weight's code, 2 to 8: those to choose from with --size, --bits or --budget bytes "
        "(repeatable; then no layer is entropy coded or has factors of codes), or the one of --method rtn or gptq.",
        show_default="all; 4 for rtn and gptq",
        rich_help_panel=_METHOD,
    ),
]
GroupSize = Annotated[
    list[int] | None,
    typer.Option(
        metavar="N",
        help="Inputs that share a scale, 8, 16, 32, 64, 128, or 0 for all of an output: those to choose from "
        "(repeatable), or the one of --method rtn or gptq, from 32 on.",
        show_default="all but 128; 32 for rtn and gptq",
        rich_help_panel=_METHOD,
    ),
]
ValueBits = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="With --ratio of parameters: bits of each number that is kept, 16, 8 or 4; 8 and 4 round afterwards.",
        show_default="16",
        rich_help_panel=_METHOD,
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
Budget = Annotated[
    BudgetUnit | None,
    typer.Option(
        metavar="UNIT",
        help="Unit of the ratio: parameters or bytes.",
        show_default="parameters",
        rich_help_panel=_METHOD,
    ),
]
Include = Annotated[
    list[IncludeChoice] | None,
    typer.Option(
        metavar="WHAT",
        help="What to compress besides the layers in the language model's blocks: embeddings (token embedding and "
        "head), vision (the tower for images, which needs --calibration with images), or none; repeatable. By default "
        "embeddings with --size, none otherwise.",
        show_default=False,
        rich_help_panel=_METHOD,
    ),
]
Ignore = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        help="Layers not to compress, such as '*.down_proj' or lm_head; repeatable.",
        rich_help_panel=_METHOD,
    ),
]
Export = Annotated[
    list[ExportChoice] | None,
    typer.Option(
        metavar="KIND",
        help=f"Format to write: {_EXPORTS}; repeatable. `rocket export` makes others later.",
        show_default="the one that the engine reads",
        rich_help_panel=_RUN,
    ),
]
Device = Annotated[str, typer.Option(metavar="DEVICE", help="auto, cpu, cuda, cuda:1, ...", rich_help_panel=_RUN)]
_DTYPE = typer.Option(
    metavar="DTYPE",
    help="Data type in which the model runs and is stored: auto (that of the checkpoint), float32, float16 or "
    "bfloat16.",
    rich_help_panel=_RUN,
)
Dtype = Annotated[config.StorageDtype, _DTYPE]
_PRECISION = typer.Option(
    metavar="DTYPE",
    help="Precision of the factorization: float32, or float64, which is slower.",
    rich_help_panel=_METHOD,
)
Precision = Annotated[config.Precision, _PRECISION]
Revision = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Branch, tag or commit of the repository.", show_default="main", rich_help_panel=_RUN
    ),
]
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
    typer.Option(
        metavar="DIR",
        help="Cache layer profiles and calibration statistics in this folder, and reuse them: another ratio "
        "then needs no second calibration.",
        show_default="no cache",
        rich_help_panel=_RUN,
    ),
]
Table = Annotated[bool, typer.Option("--table", help="Show all layers in the table, however many.")]
HealedFrom = Annotated[
    Path,
    typer.Argument(metavar="ARTIFACT", help="A factored export, or the output folder of `rocket compress`."),
]
HealingText = Annotated[
    str | None,
    typer.Option(
        "--calibration",
        metavar="NAME",
        help="Text to train on: the same names as for `rocket submit`.",
        show_default="that of the job",
        autocompletion=completion.calibration_names,
    ),
]
HealingLength = Annotated[
    int | None,
    typer.Option("--sequence-length", metavar="N", help="Tokens per window.", show_default="that of the job"),
]
HealingSeed = Annotated[
    int | None,
    typer.Option("--seed", metavar="N", help="Seed for drawing the windows.", show_default="that of the job"),
]
Original = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="The model that it was made from: a local folder, or a repository on the Hub.",
        show_default="the repository that its report names",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Write the report, or an error, to stdout as JSON.")]

Text = Annotated[Path, typer.Option(metavar="FILE", help='A .txt file, or a .jsonl file of {"text": ...} documents.')]
Limit = Annotated[int | None, typer.Option(metavar="N", help="Maximum number of windows to read.", show_default="all")]
Against = Annotated[
    str | None,
    typer.Option(metavar="ORIGINAL", help="The original of MODEL: measure it too, and how far MODEL deviates from it."),
]
Stride = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Tokens from the start of one window to the next; a smaller stride gives tokens more context, "
        "but takes longer.",
        show_default="the window's length",
    ),
]
_TASK_ITEMS = typer.Option(
    metavar="N", help="Maximum number of items per task.", show_default="all", rich_help_panel=_DATA
)
TaskItems = Annotated[int | None, _TASK_ITEMS]
_TASKS = (
    f"Zero-shot task: {', '.join(config.HUB_TASKS)}, or a %s file of items; repeatable. Requires the "
    "`evaluation` extra."
)
Tasks = Annotated[
    list[str] | None, typer.Option("--task", metavar="NAME_OR_FILE", help=_TASKS % ".jsonl", rich_help_panel=_DATA)
]

# Options of an evaluation within a compression.
_EVALUATION = config.EvaluationConfig()
Storage = Annotated[
    config.Storage | None,
    typer.Option(
        metavar="WHAT",
        help="What a size keeps small: the file, where layers may be entropy coded, or the memory as well.",
        show_default="file",
        rich_help_panel=_METHOD,
    ),
]
EvaluateOn = Annotated[
    str | None,
    typer.Option(
        "--evaluate",
        metavar="NAME_OR_FILE",
        help="Evaluate the original and the compressed model on this text afterwards; the same names as for "
        "--calibration. "
        "Requires memory for the whole model.",
        show_default="no evaluation",
    ),
]
EvaluateJobOn = Annotated[
    str | None,
    typer.Option(
        "--evaluate",
        metavar="NAME",
        help="Text that both models read; the same names as for `rocket submit --calibration`.",
        show_default=config.BUILTIN_DATASET,
    ),
]
EvaluateSamples = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="Number of evaluation windows.", show_default=str(_EVALUATION.samples), rich_help_panel=_DATA
    ),
]
EvaluateLength = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="Tokens per evaluation window.", show_default=_WINDOW_DEFAULT, rich_help_panel=_DATA
    ),
]
EvaluateStride = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Tokens from the start of one evaluation window to the next.",
        show_default="the window's length",
        rich_help_panel=_DATA,
    ),
]
Prompts = Annotated[
    list[str] | None,
    typer.Option(
        "--prompt",
        metavar="TEXT",
        help="Prompt that the original and the compressed model both answer; shows where they diverge. Repeatable.",
        rich_help_panel=_DATA,
    ),
]
AnswerTokens = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Tokens of the longest answer to a prompt.",
        show_default=str(_EVALUATION.answer_tokens),
        rich_help_panel=_DATA,
    ),
]
Benchmark = Annotated[
    bool,
    typer.Option(
        "--benchmark",
        help="Measure speed and memory of the original and of each export afterwards. Requires memory for all of them.",
    ),
]
ServerTasks = Annotated[
    list[str] | None,
    typer.Option("--task", metavar="NAME", help=_TASKS % "local/FILE.jsonl", rich_help_panel=_DATA),
]


# Options of commands that talk to a server. Only given options are sent; the server has the defaults.
Server = Annotated[
    str, typer.Option(metavar="URL", envvar=SERVER_VARIABLE, help="Address of the server.", show_default=DEFAULT_SERVER)
]
JobId = Annotated[
    str,
    typer.Argument(metavar="JOB", help="Id of a job, as listed by `rocket jobs`.", autocompletion=completion.job_ids),
]
JobOrProfile = Annotated[
    str,
    typer.Argument(
        metavar="JOB_OR_PROFILE",
        help="Id of a profile, or of a job that has profiled its layers.",
        autocompletion=completion.jobs_and_profiles,
    ),
]
ServerModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL_ID",
        help="local/NAME from the server's models folder, or a repository on the Hub.",
        autocompletion=completion.model_ids,
    ),
]
EstimatedModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A local folder, a repository on the Hub, or local/NAME or upload/NAME of a server.",
        autocompletion=completion.model_ids,
    ),
]
Local = Annotated[
    bool,
    typer.Option("--local", help="Estimate a run on this machine even if MODEL is a repository on the Hub."),
]
ServerCalibration = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"Calibration text: {config.BUILTIN_DATASET} (the default), {', '.join(config.HUB_DATASETS)}, or "
        "local/FILE from the server's datasets folder, or the id that `rocket upload` prints. For an image or "
        "audio model: "
        f"local/FOLDER, or {config.SYNTHETIC_DATASET} (generated data, at a cost in quality).",
        autocompletion=completion.calibration_names,
    ),
]
ServerSamples = Annotated[int | None, _SAMPLES]
ServerSeed = Annotated[int | None, _SEED]
ServerDtype = Annotated[config.StorageDtype | None, _DTYPE]
ServerPrecision = Annotated[config.Precision | None, _PRECISION]
Metadata = Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Label for the job; repeatable.")]
HubTokenVariable = Annotated[
    str | None,
    typer.Option(
        "--hub-token-env",
        metavar="VARIABLE",
        help="Environment variable that holds a Hugging Face Hub token, for private and gated repositories.",
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
IdempotencyKey = Annotated[
    str | None, typer.Option(metavar="KEY", help="A second submission with the same key returns the first job.")
]
Watch = Annotated[bool, typer.Option("--watch", help="Follow the job until it ends.")]
Wait = Annotated[bool, typer.Option("--wait", help="Wait until the job has stopped.")]
Status = Annotated[
    str | None,
    typer.Option(
        metavar="STATUS",
        help="Only jobs with this status: queued, running, cancelling, succeeded, failed or cancelled.",
        autocompletion=completion.statuses,
    ),
]
JobLimit = Annotated[int, typer.Option(metavar="N", min=1, help="Maximum number of jobs.")]
After = Annotated[
    str | None,
    typer.Option(metavar="JOB", help="Only jobs older than this one.", autocompletion=completion.job_ids),
]
DownloadFolder = Annotated[
    Path | None,
    typer.Argument(metavar="DIR", help="Folder for the files.", show_default="a folder named after the job"),
]
DownloadExport = Annotated[
    list[ExportChoice] | None,
    typer.Option("--export", metavar="KIND", help=f"Only this export: {_EXPORTS}; repeatable.", show_default="all"),
]
JsonResult = Annotated[bool, typer.Option("--json", help="Write the result, or an error, to stdout as JSON.")]
