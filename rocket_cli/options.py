"""Arguments and options of the commands, each declared once."""

from collections.abc import Callable
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from rocket_cli import completion
from rocket_client._defaults import DEFAULT_SERVER, SERVER_VARIABLE
from rocket_core import config
from rocket_core.engines import ExportKind, current_name
from rocket_core.sizes.target import parse_size
from rocket_core.sizes.token_counts import parse_context, parse_tokens


class QueueChoice(StrEnum):
    """The queues of a service, as an enumeration because typer does not support Literals."""

    CPU = "cpu"
    GPU = "gpu"


class IncludeChoice(StrEnum):
    """What `--include` accepts: the entries of the setting, and a word for none."""

    EMBEDDINGS = "embeddings"
    VISION = "vision"
    NONE = "none"


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
    """Return the declaration of an option.

    Args:
        metavar: what the help shows for the value; None for a flag, or the name of the value's type.
        text: its help.
        shown: the default that the help shows; True is the value itself.
        name: its name, if it is not that of the parameter.
        more: further arguments of `typer.Option`.
    """
    names = () if name is None else (name,)
    return typer.Option(*names, metavar=metavar, help=text, show_default=shown, **more)


# Under these headings of the help, advanced options follow the others.
DATA, METHOD, RUN = "Calibration and evaluation", "Method", "Model and files"
_of_data, _of_method, _of_run = (partial(option, rich_help_panel=panel) for panel in (DATA, METHOD, RUN))


def reader(parse: Callable[[str], int]) -> Callable[[str | int], int]:
    """Return the parser of an option, whose errors are those of the command line."""

    def read(given: str | int) -> int:
        try:
            return parse(str(given))  # defaults are parsed as well
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return read


read_tokens = reader(parse_tokens)


def read_fraction(text: str) -> float:
    """Return a fraction that may be written as a percentage."""
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a valid number; use for example 0.3 or 30%") from None
    return value / 100 if text.endswith("%") else value


def read_ratio(text: str) -> float:
    """Return a fraction to remove."""
    value = read_fraction(text)
    if 1 <= value < 100 and not text.endswith("%"):
        raise typer.BadParameter(f"{text} is not less than 1; to remove {text} %, use {value / 100:.6g} or {text}%")
    return value


EXPORTS = ", ".join(get_args(ExportKind))


def read_export(given: str) -> str:
    """Return the name of an export, which may be given by the one that it had in an earlier version."""
    name = str(current_name(given))
    if name not in get_args(ExportKind):
        raise typer.BadParameter(f"{given!r} is not one of {EXPORTS}.")
    return name


EXPORT_VALUE: dict[str, Any] = {"parser": read_export, "autocompletion": lambda: list(get_args(ExportKind))}
"""How an option that names an export is read and completed."""

CALIBRATION_WINDOW_DEFAULT = "256, or the model's maximum if that is less"
WINDOW_DEFAULT = "1024, or the model's maximum if that is less"
TASKS = (
    f"Zero-shot task: {', '.join(config.HUB_TASKS)}, or a %s file of items; repeatable. Requires the "
    "`evaluation` extra."
)

Model = Annotated[str, argument("MODEL", "A local folder, or a repository on the Hugging Face Hub.", shown=False)]
Output = Annotated[Path, argument("OUT", "Output folder; each export is written to its own subfolder.")]
HealingTokens = Annotated[
    int,
    option(
        "N",
        "Tokens to read, such as 500k or 2M; text that has fewer is read again.",
        name="--tokens",
        parser=read_tokens,
    ),
]
Calibration = Annotated[
    str,
    option(
        "NAME_OR_PATH",
        "Calibration text: best like what the model will read, a .txt, .md, .jsonl, .json, .csv or .parquet file with "
        "texts or chats, or a folder of .txt and .md files; namespace/name:split on the Hub; or "
        f"{config.BUILTIN_DATASET} (CPython's documentation, offline), {', '.join(config.HUB_DATASETS)}. For an image "
        "or audio model: a folder of .png and .jpg files or of .wav files, or "
        f"{config.SYNTHETIC_DATASET} (generated data, at a cost in quality).",
    ),
]
FitMemory = Annotated[
    int | None,
    option(
        "SIZE",
        "Memory that the weights have to fit into, together with keys and values of --context tokens and an allowance "
        "for the engine that --for names: 24GB. Instead of --ratio.",
        shown=False,
        parser=reader(parse_size),
    ),
]
FitContext = Annotated[
    int | None,
    option(
        "TOKENS",
        "With --fit: tokens of the longest sequence, prompt and answer together, such as 32k (32,768).",
        shown=False,
        parser=reader(parse_context),
    ),
]
FitBatch = Annotated[
    int | None, option("N", "With --fit: sequences of that length that are in memory at the same time.", "1")
]
FitKvBits = Annotated[
    int | None,
    option(
        "N",
        "With --fit: bits of the keys and values that are kept, of those that the engine has: 16, 8 or 4.",
        "the engine's",
    ),
]
Samples = Annotated[int | None, _of_data("N", "Number of calibration windows (text, audio) or images.")]
CalibrationLength = Annotated[int | None, _of_data("N", "Tokens per window.", CALIBRATION_WINDOW_DEFAULT)]
SequenceLength = Annotated[int | None, _of_data("N", "Tokens per window.", WINDOW_DEFAULT)]
Seed = Annotated[int | None, _of_data("N", "Seed for drawing the windows.")]
Column = Annotated[
    str | None, _of_data("NAME", "Column with the text, or with lists of messages.", "text, else a chat's columns")
]
SkipBadRows = Annotated[
    bool | None,
    _of_data(None, "Skip rows without text, and chats that the chat template refuses.", False, name="--skip-bad-rows"),
]
Pack = Annotated[
    bool | None,
    _of_data(
        None,
        "Concatenate texts and cut them into windows, or give each text or chat a window, without padding.",
        "--pack",
        name="--pack/--no-pack",
    ),
]
Device = Annotated[str, _of_run("DEVICE", "auto, cpu, cuda, cuda:1, ...")]
Devices = Annotated[
    str, _of_run("DEVICES", "auto (all GPUs, else the CPU), cpu, cuda (all), cuda:1, cuda:0,cuda:2, ...")
]
Dtype = Annotated[
    config.StorageDtype | None,
    _of_run(
        "DTYPE",
        "Data type in which the model runs and is stored: auto (that of the checkpoint), float32, float16 or bfloat16.",
    ),
]
Precision = Annotated[
    config.Precision | None,
    _of_method("DTYPE", "Precision of the factorization: float32, or float64, which is slower."),
]
Revision = Annotated[str | None, _of_run("NAME", "Branch, tag or commit of the repository.", "main")]
Resume = Annotated[bool, typer.Option("--resume", help="Resume an interrupted run.")]
Energy = Annotated[
    bool, _of_run(None, "Measure the energy used by each stage with codecarbon, offline.", name="--energy/--no-energy")
]
Table = Annotated[bool, typer.Option("--table", help="Show all layers in the table, however many.")]
HealedFrom = Annotated[Path, argument("ARTIFACT", "A `rocket` export, or the output folder of `rocket compress`.")]
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
TaskItems = Annotated[int | None, _of_data("N", "Maximum number of items per task.", "all")]
Tasks = Annotated[list[str] | None, _of_data("NAME_OR_FILE", TASKS % ".jsonl", name="--task")]

EvaluateJobOn = Annotated[
    str | None,
    option(
        "NAME",
        "Text that both models read; the same names as for `rocket submit --calibration`.",
        config.BUILTIN_DATASET,
        name="--evaluate",
    ),
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
    int | None,
    _of_data("N", "Tokens of the longest answer to a prompt.", str(config.EvaluationConfig().answer_tokens), min=1),
]


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
SubmittedModel = Annotated[
    str | None,
    argument(
        "MODEL_ID",
        "local/NAME from the server's models folder, or a repository on the Hub.",
        "that of --from",
        autocompletion=completion.model_ids,
    ),
]
EarlierJob = Annotated[
    str | None,
    option(
        "JOB",
        "Take model, target, calibration, engine and what is measured from an earlier job; options that are given "
        "replace its own, such as --preset best. The page of the new job compares both.",
        name="--from",
        autocompletion=completion.job_ids,
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
HubRepository = Annotated[str, argument("REPO", "NAMESPACE/NAME on the Hub; created if necessary.", shown=False)]
Private = Annotated[bool, typer.Option("--private", help="Require the repository to be private.")]
HubTokenVariable = Annotated[
    str | None,
    option(
        "VARIABLE",
        "Environment variable that holds a Hugging Face Hub token, for private and gated repositories.",
        name="--hub-token-env",
    ),
]
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
    list[str] | None,
    option("KIND", f"Only this export: {EXPORTS}; repeatable.", "all", name="--export", **EXPORT_VALUE),
]
JsonResult = Annotated[bool, typer.Option("--json", help="Write the result, or an error, to stdout as JSON.")]
