"""Arguments and options of the commands, each declared once."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from rocket_cli import completion
from rocket_client._defaults import DEFAULT_SERVER, SERVER_VARIABLE
from rocket_core import config


class QueueChoice(StrEnum):
    """The queues of a service, as an enumeration because typer does not support Literals."""

    CPU = "cpu"
    GPU = "gpu"


class ExportChoice(StrEnum):
    """The values of `ExportKind`, as an enumeration because typer does not support lists of Literals."""

    FACTORED = "factored"
    DENSE = "dense"


_WINDOW_DEFAULT = "1024, or less if the model takes less"

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A folder, or a repository of the Hugging Face hub.", show_default=False)
]
Output = Annotated[
    Path, typer.Argument(metavar="OUT", help="Folder for the result: each export gets its own folder in it.")
]
Ratio = Annotated[
    float | None,
    typer.Option(
        metavar="R",
        help="Fraction of the compressible parameters to remove, from 0 to below 1. This or --size is needed.",
        show_default=False,
    ),
]


def _size(text: str) -> int:
    try:
        return _SIZE.validate_python(text)
    except ValidationError:
        raise typer.BadParameter(f"{text!r} is not a size; write bytes, or 500MB, 1.5GB, 700MiB") from None


_SIZE: TypeAdapter[int] = TypeAdapter(ByteSize)
Size = Annotated[
    int | None,
    typer.Option(
        metavar="SIZE",
        parser=_size,
        help="Most that the weights of the factored artifact may take: bytes, or 500MB, 1.5GiB. In place of --ratio.",
        show_default=False,
    ),
]


def require_target(ratio: float | None, size: int | None) -> None:
    """Raise an error unless exactly one of `--ratio` and `--size` is given."""
    if (ratio is None) == (size is None):
        raise typer.BadParameter("specify exactly one of them", param_hint="--ratio or --size")


Calibration = Annotated[
    str,
    typer.Option(
        metavar="NAME_OR_PATH",
        help=f"Calibration text: {config.BUILTIN_DATASET} (CPython's documentation, offline), "
        f"{', '.join(config.HUB_DATASETS)}, or a .txt or .jsonl file. For a model of images or audio: a folder of "
        f".png and .jpg or of .wav files, or {config.SYNTHETIC_DATASET} (made up; costs quality).",
    ),
]
_SAMPLES = typer.Option(metavar="N", help="Windows of calibration text or audio, or images.")
Samples = Annotated[int, _SAMPLES]
SequenceLength = Annotated[
    int | None, typer.Option(metavar="N", help="Tokens per window.", show_default=_WINDOW_DEFAULT)
]
_SEED = typer.Option(metavar="N", help="Which windows are drawn.")
Seed = Annotated[int, _SEED]
_OBJECTIVE = typer.Option(
    metavar="NAME",
    help="What to minimise: weight (error of the weights, with a cap on each layer), whitened (error of the layers' "
    "output) or fisher (expected increase of the loss).",
    show_default="the preset's",
)
Objective = Annotated[config.Objective | None, _OBJECTIVE]
Preset = Annotated[
    config.Preset | None,
    typer.Option(
        metavar="NAME",
        help="Settings by name: paper (the paper's algorithm to the letter), fast (twice its time), or best (three "
        "times or a little more). Explicit options take precedence.",
        show_default=config.DEFAULT_PRESET,
    ),
]
Method = Annotated[
    config.Method | None,
    typer.Option(
        metavar="NAME",
        help="rocket, or to compare with: rocket-uniform, svd-llm, cospadi, magnitude, wanda.",
        show_default="rocket",
    ),
]
Budget = Annotated[
    config.BudgetUnit | None,
    typer.Option(
        metavar="UNIT", help="What the ratio is a fraction of: parameters, or bytes.", show_default="parameters"
    ),
]
Ignore = Annotated[
    list[str] | None,
    typer.Option(metavar="PATTERN", help="Layers to leave alone, like '*.down_proj'; repeatable."),
]
Export = Annotated[
    list[ExportChoice] | None,
    typer.Option(metavar="KIND", help="What to write: factored or dense; repeatable.", show_default="both"),
]
Device = Annotated[str, typer.Option(metavar="DEVICE", help="auto, cpu, cuda, cuda:1, ...")]
_DTYPE = typer.Option(
    metavar="DTYPE",
    help="In which the model runs and is stored: auto (the checkpoint's own), float32, float16 or bfloat16.",
)
Dtype = Annotated[config.StorageDtype, _DTYPE]
_PRECISION = typer.Option(metavar="DTYPE", help="Of the factorization: float32, or float64, which is slower.")
Precision = Annotated[config.Precision, _PRECISION]
Revision = Annotated[
    str | None, typer.Option(metavar="NAME", help="Branch, tag or commit of the repository.", show_default="main")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on where an interrupted run stopped.")]
Energy = Annotated[
    bool,
    typer.Option("--energy/--no-energy", help="Measure the energy of each stage, by codecarbon and without a network."),
]
Profiles = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Keep layer profiles and calibration statistics in this folder, and take them from there: another ratio "
        "needs no second calibration.",
        show_default="not kept",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Write the report to stdout as JSON, errors too.")]

Text = Annotated[Path, typer.Option(metavar="FILE", help='A .txt file, or a .jsonl file of {"text": ...} documents.')]
Limit = Annotated[int | None, typer.Option(metavar="N", help="Windows to read.", show_default="all")]
Against = Annotated[
    str | None,
    typer.Option(metavar="DENSE", help="The dense original: measure it too, and how far MODEL is from it."),
]
Stride = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Tokens from one window's begin to the next: less gives tokens more context, and costs more windows.",
        show_default="the window's length",
    ),
]
_TASK_ITEMS = typer.Option(metavar="N", help="Items to read of each task.", show_default="all")
TaskItems = Annotated[int | None, _TASK_ITEMS]
_TASKS = (
    f"Zero-shot task: {', '.join(config.HUB_TASKS)}, or a %s file of items; repeatable. Needs the extra evaluation."
)
Tasks = Annotated[list[str] | None, typer.Option("--task", metavar="NAME_OR_FILE", help=_TASKS % ".jsonl")]

# Options of an evaluation within a compression.
_EVALUATION = config.EvaluationConfig()
EvaluateOn = Annotated[
    str | None,
    typer.Option(
        "--evaluate",
        metavar="NAME_OR_FILE",
        help="Measure dense and compressed model on this text at the end, named as calibration text is. Needs memory "
        "for the whole model.",
        show_default="not at all",
    ),
]
EvaluateSamples = Annotated[
    int | None, typer.Option(metavar="N", help="Windows to measure on.", show_default=str(_EVALUATION.samples))
]
EvaluateLength = Annotated[
    int | None, typer.Option(metavar="N", help="Tokens per window measured on.", show_default=_WINDOW_DEFAULT)
]
EvaluateStride = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="Tokens from one such window's begin to the next.", show_default="the window's length"
    ),
]
ServerTasks = Annotated[
    list[str] | None,
    typer.Option("--task", metavar="NAME", help=_TASKS % "local/FILE.jsonl"),
]
JsonErrors = Annotated[
    bool, typer.Option("--json", help="Write errors to stdout as JSON too; the result is JSON in any case.")
]


def evaluation(**given: Any) -> dict[str, Any] | None:
    """Return the given settings of an evaluation, without those that are None; None if no setting is given."""
    return {name: value for name, value in given.items() if value is not None} or None


# Options of commands that talk to a server. Only given options are sent; the server has the defaults.
Server = Annotated[
    str, typer.Option(metavar="URL", envvar=SERVER_VARIABLE, help="Address of the server.", show_default=DEFAULT_SERVER)
]
JobId = Annotated[
    str,
    typer.Argument(metavar="JOB", help="Id of a job, as `rocket jobs` lists them.", autocompletion=completion.job_ids),
]
JobOrProfile = Annotated[
    str,
    typer.Argument(
        metavar="JOB_OR_PROFILE",
        help="Id of a job that has profiled its layers, or of a profile.",
        autocompletion=completion.jobs_and_profiles,
    ),
]
ServerModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL_ID",
        help="local/NAME of the server's models folder, or a repository of the Hub.",
        autocompletion=completion.model_ids,
    ),
]
ServerCalibration = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"Calibration text: {config.BUILTIN_DATASET} (the default), {', '.join(config.HUB_DATASETS)}, or "
        "local/FILE of the server's datasets folder, or what `rocket upload` prints. For a model of images or audio: "
        f"local/FOLDER, or {config.SYNTHETIC_DATASET} (made up; costs quality).",
        autocompletion=completion.calibration_names,
    ),
]
ServerSamples = Annotated[int | None, _SAMPLES]
ServerSeed = Annotated[int | None, _SEED]
ServerDtype = Annotated[config.StorageDtype | None, _DTYPE]
ServerPrecision = Annotated[config.Precision | None, _PRECISION]
Metadata = Annotated[
    list[str] | None, typer.Option(metavar="KEY=VALUE", help="A label of your own for the job; repeatable.")
]
HubTokenVariable = Annotated[
    str | None,
    typer.Option(
        "--hub-token-env",
        metavar="VARIABLE",
        help="Environment variable with a token of the Hugging Face Hub, for what only its owner may read.",
    ),
]
JobQueue = Annotated[
    QueueChoice | None,
    typer.Option("--queue", help="Which of the server's workers run it.", show_default="the server's default"),
]
IdempotencyKey = Annotated[
    str | None, typer.Option(metavar="KEY", help="Submitted again under the same key, the job is the same one.")
]
Watch = Annotated[bool, typer.Option("--watch", help="Stay until the job has ended.")]
Wait = Annotated[bool, typer.Option("--wait", help="Stay until the job has stopped.")]
Status = Annotated[
    str | None,
    typer.Option(
        metavar="STATUS",
        help="Only queued, running, cancelling, succeeded, failed or cancelled ones.",
        autocompletion=completion.statuses,
    ),
]
JobLimit = Annotated[int, typer.Option(metavar="N", min=1, help="How many at most.")]
After = Annotated[
    str | None,
    typer.Option(metavar="JOB", help="Only jobs older than this one.", autocompletion=completion.job_ids),
]
DownloadFolder = Annotated[
    Path | None, typer.Argument(metavar="DIR", help="Folder for the files.", show_default="a folder named as the job")
]
DownloadExport = Annotated[
    list[ExportChoice] | None,
    typer.Option("--export", metavar="KIND", help="Only factored or dense; repeatable.", show_default="all"),
]
JsonResult = Annotated[bool, typer.Option("--json", help="Write the result to stdout as JSON, errors too.")]
